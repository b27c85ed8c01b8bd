"""List the files that a session has open and the locks it holds on them: work that may be half done at a checkpoint."""

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
    """Describe one descriptor of a regular file; `locks` in the kernel's words: `FLOCK WRITE`, `POSIX READ 0-99`."""

    pid: int
    fd: int
    path: str
    access: Literal["read", "write", "both"]
    offset: int
    locks: tuple[str, ...]


def opened(group: str) -> list[Opened]:
    """Return the files open for writing, or locked; the first MAX_OPEN of them."""
    found: list[Opened] = []
    for pid in cgroup.pids(group):
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
        for name in sorted(names, key=int):
            file = _look(pid, int(name))
            if file is not None and (file.access != "read" or file.locks):
                found.append(file)
            if len(found) >= MAX_OPEN:
                return found
    return found


def rollback_databases(group: str) -> list[str]:
    """Return the SQLite databases open for writing that are not in WAL mode: SQLite compares the inode number of such a
    one with the earlier one, and a session's files get other numbers when they are restored. Reading them here disturbs
    no lock, because locks belong to processes; a file with a lease (fcntl F_SETLEASE) is skipped, because opening it
    would break the lease."""
    found = set()
    for entry in opened(group):
        if any(lock.startswith("LEASE") for lock in entry.locks):
            continue
        try:
            with open(f"/proc/{entry.pid}/fd/{entry.fd}", "rb", buffering=0) as file:
                head = file.read(_SQLITE_HEAD)
        except OSError:
            continue  # closed, or ended, while we looked
        if entry.access != "read" and is_rollback_database(head):
            found.add(entry.path)
    return sorted(found)


def is_rollback_database(head: bytes) -> bool:
    """Return whether these are the first bytes of one: the write version is 1, and 2 in WAL mode."""
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
    """Return what the text of /proc/PID/fdinfo/FD tells. Pure."""
    fields = dict(line.split(":", 1) for line in info.splitlines() if not line.startswith("lock:"))
    locks = tuple(_lock(line) for line in info.splitlines() if line.startswith("lock:"))
    access = _ACCESS.get(int(fields["flags"], 8) & os.O_ACCMODE, "both")
    return Opened(pid, fd, path, access, int(fields["pos"]), locks)


def _lock(line: str) -> str:
    """Return `POSIX WRITE 0-EOF` for `lock: 1: POSIX  ADVISORY  WRITE 4711 00:2a:99 0 EOF`."""
    _, _, kind, _, access, _, _, first, last = line.split()
    return f"{kind} {access}" if kind == "FLOCK" else f"{kind} {access} {first}-{last}"
