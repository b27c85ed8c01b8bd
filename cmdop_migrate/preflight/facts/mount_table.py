"""Read which file systems are mounted in a session, and resolve on which of them a path lies."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# What CRIU mounts again by itself. An overlay is known only where it is one of the session's own layers: CRIU mounts
# another one with the same options, which name directories that are not there yet.
_KNOWN = (
    "proc sysfs tmpfs devtmpfs devpts mqueue cgroup cgroup2 binfmt_misc debugfs tracefs securityfs fusectl pstore "
    "autofs"
)
KNOWN = frozenset(_KNOWN.split())
LOST = frozenset(("tracefs",))  # CRIU leaves it out without a word


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo. `device` is the number as fdinfo writes it."""

    id: int
    parent: int
    device: int
    point: str
    kind: str


@dataclass(frozen=True)
class MountTable:
    """The mounts of one mount namespace."""

    mounts: dict[int, Mount]
    under: dict[int, list[Mount]] = field(default_factory=dict)

    def at(self, path: str) -> Mount | None:
        """The mount that a path resolves to, links not followed."""
        current = next((one for one in self.mounts.values() if one.parent not in self.mounts), None)
        while current is not None:
            inner = [one for one in self.under.get(current.id, ()) if _is_at_or_under(path, one.point)]
            if not inner:
                break
            current = min(inner, key=lambda one: len(one.point))
        return current


def _is_at_or_under(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def parse(text: str) -> MountTable:
    """Parse /proc/PID/mountinfo."""
    mounts: dict[int, Mount] = {}
    for line in text.split("\n"):  # other ends of lines may be in a name
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 6 or not right:
            continue
        major, _, minor = fields[2].partition(":")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        device = int(major) << 20 | int(minor)
        mounts[int(fields[0])] = Mount(int(fields[0]), int(fields[1]), device, point, right.split(" ")[0])
    under: dict[int, list[Mount]] = {}
    for one in mounts.values():
        under.setdefault(one.parent, []).append(one)
    return MountTable(mounts, under)


def read(pid: int) -> MountTable:
    """Read the table of the mount namespace `pid` is in; empty when the process is gone."""
    try:
        return parse(Path(f"/proc/{pid}/mountinfo").read_bytes().decode("utf-8", "surrogateescape"))
    except OSError:
        return MountTable({})


def unknown(tables: Iterable[MountTable], given: Iterable[str]) -> tuple[set[str], set[str]]:
    """Find the mounts that a restore cannot make, and those it would leave out, each as `kind at point`. `given`:
    the mount points that the session was started with."""
    points, tables = set(given), list(tables)
    ours = {one.device for table in tables for one in table.mounts.values() if one.point in points}
    cannot, lost = set(), set()
    for one in (mount for table in tables for mount in table.mounts.values()):
        if one.kind in LOST:
            lost.add(f"{one.kind} at {one.point}")
        elif one.kind not in KNOWN and one.device not in ours:
            cannot.add(f"{one.kind} at {one.point}")
    return cannot, lost


def message_queues(table: MountTable, root_pid: int) -> list[str]:
    """List the POSIX message queues in the session's own /dev/mqueue."""
    found: set[str] = set()
    for one in table.mounts.values():
        if one.kind == "mqueue":
            try:
                found |= set(os.listdir(f"/proc/{root_pid}/root{one.point}"))
            except OSError:
                continue  # unmounted meanwhile
    return sorted(found)
