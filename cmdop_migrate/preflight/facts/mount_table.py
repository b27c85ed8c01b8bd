"""Read which file systems are mounted in a session, and resolve on which of them a path lies."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# File systems that CRIU mounts again by itself. An overlay is known only if it is one of the session's own layers: CRIU
# mounts any other one with its old options, whose directories do not exist yet.
_KNOWN = (
    "proc sysfs tmpfs devtmpfs devpts mqueue cgroup cgroup2 binfmt_misc debugfs tracefs securityfs fusectl pstore "
    "autofs"
)
KNOWN = frozenset(_KNOWN.split())
LOST = frozenset(("tracefs",))  # CRIU omits it silently


@dataclass(frozen=True)
class Mount:
    """Describe one line of mountinfo. `device` is the number as fdinfo prints it."""

    id: int
    parent: int
    device: int
    point: str
    kind: str


@dataclass(frozen=True)
class MountTable:
    """Hold the mounts of one mount namespace."""

    mounts: dict[int, Mount]
    under: dict[int, list[Mount]] = field(default_factory=dict)

    def at(self, path: str) -> Mount | None:
        """Return the mount to which a path resolves; links are not followed."""
        current = next((mount for mount in self.mounts.values() if mount.parent not in self.mounts), None)
        while current is not None:
            inner = [mount for mount in self.under.get(current.id, ()) if _is_at_or_under(path, mount.point)]
            if not inner:
                break
            current = min(inner, key=lambda mount: len(mount.point))
        return current


def _is_at_or_under(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def parse(text: str) -> MountTable:
    """Parse /proc/PID/mountinfo."""
    mounts: dict[int, Mount] = {}
    for line in text.split("\n"):  # a name may contain other line ends
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 6 or not right:
            continue
        major, _, minor = fields[2].partition(":")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        device = int(major) << 20 | int(minor)
        mounts[int(fields[0])] = Mount(int(fields[0]), int(fields[1]), device, point, right.split(" ")[0])
    under: dict[int, list[Mount]] = {}
    for mount in mounts.values():
        under.setdefault(mount.parent, []).append(mount)
    return MountTable(mounts, under)


def read(pid: int) -> MountTable:
    """Read the mounts of the mount namespace of `pid`; empty when the process has ended."""
    try:
        return parse(Path(f"/proc/{pid}/mountinfo").read_bytes().decode("utf-8", "surrogateescape"))
    except OSError:
        return MountTable({})


def unknown(tables: Iterable[MountTable], given: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the mounts that a restore cannot create, and those that it would omit, each as `kind at point`. `given`:
    the mount points that the session was started with."""
    points, tables = set(given), list(tables)
    ours = {mount.device for table in tables for mount in table.mounts.values() if mount.point in points}
    cannot, lost = set(), set()
    for mount in (mount for table in tables for mount in table.mounts.values()):
        if mount.kind in LOST:
            lost.add(f"{mount.kind} at {mount.point}")
        elif mount.kind not in KNOWN and mount.device not in ours:
            cannot.add(f"{mount.kind} at {mount.point}")
    return cannot, lost


def message_queues(table: MountTable, root_pid: int) -> list[str]:
    """List the POSIX message queues in the session's own /dev/mqueue."""
    queues: set[str] = set()
    for mount in table.mounts.values():
        if mount.kind == "mqueue":
            try:
                queues |= set(os.listdir(f"/proc/{root_pid}/root{mount.point}"))
            except OSError:
                continue  # unmounted meanwhile
    return sorted(queues)
