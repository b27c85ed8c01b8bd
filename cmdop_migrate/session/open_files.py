"""Files a session has open, and the locks it holds on them: what may be half done when it is stopped."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cmdop_migrate.holder import cgroup

MAX_OPEN = 1000
_SQLITE = b"SQLite format 3\0"
_SQLITE_HEAD = 19  # up to its write version
_ACCESS: dict[int, Literal["read", "write", "both"]] = {os.O_RDONLY: "read", os.O_WRONLY: "write", os.O_RDWR: "both"}


@dataclass(frozen=True)
class Opened:
    """One descriptor of a regular file; `locks` as the kernel words them: `FLOCK WRITE`, `POSIX READ 0-99`."""

    pid: int
    fd: int
    path: str
    access: Literal["read", "write", "both"]
    offset: int
    locks: tuple[str, ...]


def opened(group: str) -> list[Opened]:
    """Those open for writing, or locked; the first MAX_OPEN of them."""
    found: list[Opened] = []
    for pid in cgroup.pids(group):
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
        for name in sorted(names, key=int):
            one = _look(pid, int(name))
            if one is not None and (one.access != "read" or one.locks):
                found.append(one)
            if len(found) >= MAX_OPEN:
                return found
    return found


def rollback_databases(group: str) -> list[str]:
    """SQLite databases open for writing that are not in WAL mode: SQLite compares the inode number of such a one with
    what it was, and a session's files get others when they are made anew. Reading them here disturbs no lock, which is
    of processes; a file with a lease (fcntl F_SETLEASE) is passed over, because opening it would break the lease."""
    found = set()
    for one in opened(group):
        if any(lock.startswith("LEASE") for lock in one.locks):
            continue
        try:
            with open(f"/proc/{one.pid}/fd/{one.fd}", "rb", buffering=0) as file:
                head = file.read(_SQLITE_HEAD)
        except OSError:
            continue  # closed, or ended, while we looked
        if one.access != "read" and is_rollback_database(head):
            found.add(one.path)
    return sorted(found)


def is_rollback_database(head: bytes) -> bool:
    """By its first bytes: the write version is 1, or, in WAL mode, 2."""
    return len(head) == _SQLITE_HEAD and head.startswith(_SQLITE) and head[_SQLITE_HEAD - 1] == 1


def _look(pid: int, fd: int) -> Opened | None:
    try:
        path = os.readlink(f"/proc/{pid}/fd/{fd}")
        if not path.startswith("/") or not stat.S_ISREG(os.stat(f"/proc/{pid}/fd/{fd}").st_mode):
            return None
        return parse(pid, fd, path, Path(f"/proc/{pid}/fdinfo/{fd}").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None  # closed, or ended, while we looked


def parse(pid: int, fd: int, path: str, info: str) -> Opened:
    """Pure, given /proc/PID/fdinfo/FD."""
    fields = dict(line.split(":", 1) for line in info.splitlines() if not line.startswith("lock:"))
    locks = tuple(_lock(line) for line in info.splitlines() if line.startswith("lock:"))
    access = _ACCESS.get(int(fields["flags"], 8) & os.O_ACCMODE, "both")
    return Opened(pid, fd, path, access, int(fields["pos"]), locks)


def _lock(line: str) -> str:
    """`lock: 1: POSIX  ADVISORY  WRITE 4711 00:2a:99 0 EOF` -> `POSIX WRITE 0-EOF`."""
    _, _, kind, _, access, _, _, first, last = line.split()
    return f"{kind} {access}" if kind == "FLOCK" else f"{kind} {access} {first}-{last}"
