"""What a session's processes hold that decides whether CRIU can dump them. Reading only: nothing is stopped for it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Kinds of sockets CRIU dumps, as the kernel names their protocols.
_SOCKETS = "TCP TCPv6 UDP UDPv6 UDP-Lite UDPLITE UDPLITEv6 RAW RAWv6 UNIX UNIX-STREAM NETLINK PACKET"
SOCKETS = frozenset(_SOCKETS.split())
_MEMORY, _MISC, _TUN = 1, 10, 200
_TERMINALS = frozenset((5, 188, 204, *range(128, 144)))
_TTY, _CONSOLES = 4, 64  # tty1 … tty63; above them are serial lines
_DELETED = " (deleted)"


@dataclass(frozen=True)
class Process:
    """One process. `tracer` is 0 when nobody traces it; `deleted`: open files without a name, with their sizes."""

    pid: int
    command: str
    uid: int
    tracer: int = 0
    inner_namespace: bool = False
    io_uring: bool = False
    semaphore: bool = False
    devices: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    deleted: tuple[tuple[str, int], ...] = ()

    @property
    def shown(self) -> str:
        return f"{self.command} (pid {self.pid})"


@dataclass(frozen=True)
class Tree:
    """The processes of one session, on a host where root may (or may not) read the limits of other users'."""

    name: str
    processes: tuple[Process, ...]
    reads_limits: bool
    deleted_limit: int


def read(pids: Iterable[int], root_pid: int | None) -> tuple[Process, ...]:
    """Those that live. `root_pid` is the session's first process, whose pid namespace is the session's."""
    own = None if root_pid is None else _namespace(root_pid)
    found = []
    for pid in pids:
        try:
            found.append(_one(pid, own))
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
    return tuple(found)


def _one(pid: int, own: str | None) -> Process:
    status = parse_status(Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace"))
    kinds: set[str] = set()
    semaphore, devices, sockets, deleted = False, set(), set(), set()
    for fd in _fds(pid):
        path = f"/proc/{pid}/fd/{fd}"
        try:
            link, info = os.readlink(path), os.stat(path)
            kinds.add(link)
            if link == "anon_inode:[eventfd]":
                semaphore = semaphore or "eventfd-semaphore: 1" in Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
            elif stat.S_ISSOCK(info.st_mode):
                sockets.add(_protocol(path))
            elif is_odd_device(info.st_mode, info.st_rdev):
                devices.add(link)
            elif stat.S_ISREG(info.st_mode) and info.st_nlink == 0 and is_deleted_file(link):
                deleted.add((link.removesuffix(_DELETED), info.st_size))
        except OSError:
            continue  # closed meanwhile
    namespace = _namespace(pid)
    return Process(
        pid=pid,
        command=status.get("Name", str(pid)),
        uid=int(status.get("Uid", "0").split()[0]),
        tracer=int(status.get("TracerPid", "0")),
        inner_namespace=own is not None and namespace not in (own, None),
        io_uring="anon_inode:[io_uring]" in kinds,
        semaphore=semaphore,
        devices=tuple(sorted(devices)),
        sockets=tuple(sorted(sockets - SOCKETS - {""})),
        deleted=tuple(sorted(deleted)),
    )


def parse_status(text: str) -> dict[str, str]:
    """/proc/PID/status by name."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def is_odd_device(mode: int, number: int) -> bool:
    """Whether CRIU has no way to open it again: it knows memory devices, terminals and tun."""
    if not stat.S_ISCHR(mode):
        return stat.S_ISBLK(mode)
    major, minor = os.major(number), os.minor(number)
    if major == _TTY:
        return minor >= _CONSOLES
    return major != _MEMORY and major not in _TERMINALS and (major, minor) != (_MISC, _TUN)


def is_deleted_file(link: str) -> bool:
    """Whether it had a name in a file system once: what never had one is memory, and travels as such."""
    return link.endswith(_DELETED) and not link.startswith(("/memfd:", "/SYSV", "/[aio]", "/anon_hugepage"))


def _fds(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []  # a zombie has none


def _protocol(path: str) -> str:
    """As the kernel calls it; empty when it does not tell."""
    try:
        return os.getxattr(path, "system.sockprotoname").rstrip(b"\0").decode("ascii", "replace")
    except OSError:
        return ""


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None
