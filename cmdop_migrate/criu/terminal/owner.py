"""Write into the images of a dump which session and which process group have the session's own terminal.

CRIU asks the first process that it finds with the terminal open. If that process
is not in the terminal's session (in the sense of setsid: dumb-init, `setsid -c`),
the kernel does not tell it, and the image says that no session has the terminal.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cmdop_migrate.criu.image.records import ImageFile
from cmdop_migrate.criu.terminal.terminal_images import INFO, Info, is_slave_without_master


@dataclass(frozen=True)
class _Process:
    """What the kernel shows of one process; numbers of processes as this host has them, and as the session has them."""

    terminal: int  # device number, 0 for none
    foreground: int  # process group that has the terminal in the foreground
    group: int
    group_inside: int
    session_inside: int


def write(images: Path, pids: Iterable[int]) -> None:
    """Change the images of a dump of these processes, which are still frozen. Raises Malformed."""
    if not (images / INFO).exists():
        return
    info = ImageFile(images / INFO)
    processes = [process for process in map(_read, sorted(pids)) if process is not None]
    changed = False
    for entry in info.records:
        if not is_slave_without_master(entry, info):
            continue
        owner = next((one for one in processes if one.terminal and one.terminal == entry.number(Info.RDEV)), None)
        if owner is None:
            continue
        groups = {one.group: one.group_inside for one in processes if one.session_inside == owner.session_inside}
        group = groups.get(owner.foreground, owner.session_inside)  # the leader's, if that group has ended
        if (entry.number(Info.SESSION), entry.number(Info.GROUP)) != (owner.session_inside, group):
            entry.set(Info.SESSION, owner.session_inside)
            entry.set(Info.GROUP, group)
            changed = True
    if changed:
        info.save()


def _read(pid: int) -> _Process | None:
    """-> None when it has ended, or the kernel has no such numbers of it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    numbers = [fields.get(name, "").split() for name in ("NSpgid", "NSsid")]
    if not all(numbers):
        return None
    group, session = (int(one[-1]) for one in numbers)
    terminal = int(stat[4])
    device = os.makedev(os.major(terminal), os.minor(terminal))
    return _Process(device, int(stat[5]), int(stat[2]), group, session)
