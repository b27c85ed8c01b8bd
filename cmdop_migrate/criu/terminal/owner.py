"""Write into the images of a dump which session and which process group own the session's own terminal.

CRIU queries the owner in the first process that it finds with the terminal open. If that process is not in the
terminal's session (in the sense of setsid: dumb-init, `setsid -c`), the kernel does not tell it, and the image says
that no session owns the terminal.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cmdop_migrate.criu.protobuf import ImageFile
from cmdop_migrate.criu.terminal.terminal_images import INFO, Info, is_slave_without_master
from cmdop_migrate.util import proc


@dataclass(frozen=True)
class _Process:
    """Hold what /proc shows of one process. `_inside`: numbered as in the session; the others as on this host."""

    terminal: int  # device number, 0 for none
    foreground: int  # process group that has the terminal in the foreground
    group: int
    group_inside: int
    session_inside: int


def write(images: Path, pids: Iterable[int]) -> None:
    """Change the images of a dump of these processes, which are still frozen. Raise Malformed."""
    if not (images / INFO).exists():
        return
    info = ImageFile(images / INFO)
    processes = [process for process in map(_read, sorted(pids)) if process is not None]
    changed = False
    for entry in info.records:
        if not is_slave_without_master(entry, info):
            continue
        owner = next((task for task in processes if task.terminal and task.terminal == entry.number(Info.RDEV)), None)
        if owner is None:
            continue
        groups = {task.group: task.group_inside for task in processes if task.session_inside == owner.session_inside}
        group = groups.get(owner.foreground, owner.session_inside)  # the leader's, if that group has ended
        if (entry.number(Info.SESSION), entry.number(Info.GROUP)) != (owner.session_inside, group):
            entry.set(Info.SESSION, owner.session_inside)
            entry.set(Info.GROUP, group)
            changed = True
    if changed:
        info.save()


def _read(pid: int) -> _Process | None:
    """Return None when the process has ended, or the kernel does not show these numbers."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        status = proc.status(pid)
    except OSError:
        return None
    numbers = [status.get(name, "").split() for name in ("NSpgid", "NSsid")]
    if not all(numbers):
        return None
    group, session = (int(levels[-1]) for levels in numbers)
    terminal = int(stat[4])
    device = os.makedev(os.major(terminal), os.minor(terminal))
    return _Process(device, int(stat[5]), int(stat[2]), group, session)
