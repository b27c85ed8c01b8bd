"""Describe a live session from its host: processes, sockets, changed files."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cmdop_migrate.holder import cgroup
from cmdop_migrate.session import overlay_redirects
from cmdop_migrate.util import proc

MAX_FILES = 1000
_TCP_STATES = (
    *("", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE"),
    *("CLOSE_WAIT", "LAST_ACK", "LISTEN", "CLOSING", "NEW_SYN_RECV"),
)


@dataclass(frozen=True)
class Process:
    """Describe one process."""

    pid: int
    inner_pid: int
    parent: int
    user: str
    state: str
    rss: int
    threads: int
    command: str
    fds: int


@dataclass(frozen=True)
class Socket:
    """Describe one socket."""

    pid: int
    kind: str
    local: str
    remote: str
    state: str


@dataclass(frozen=True)
class Changed:
    """Describe one file that the session changed."""

    path: str
    change: Literal["added", "changed", "deleted"]
    size: int


def processes(group: str) -> list[Process]:
    """Return the session's processes, by their numbers inside it."""
    import psutil  # here: most commands do not need it, and start faster without it

    found = []
    for pid in cgroup.pids(group):
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                found.append(
                    Process(
                        pid=pid,
                        inner_pid=proc.inner_pid(pid),
                        parent=process.ppid(),
                        user=process.username(),
                        state=process.status(),
                        rss=process.memory_info().rss,
                        threads=process.num_threads(),
                        command=" ".join(process.cmdline()) or f"[{process.name()}]",
                        fds=process.num_fds(),
                    )
                )
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
    return sorted(found, key=lambda process: process.inner_pid)


def rss(group: str) -> int:
    """Return the resident bytes of all processes together; cheap enough for a list of many sessions."""
    total = 0
    for pid in cgroup.pids(group):
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
    return total * os.sysconf("SC_PAGE_SIZE")


def sockets(group: str) -> list[Socket]:
    """Return the sockets of the session's processes, in the session's own network: /proc/PID/net, not ours."""
    found: list[Socket] = []
    tables: dict[str, dict[int, Socket]] = {}
    for pid in cgroup.pids(group):
        try:
            space = os.readlink(f"/proc/{pid}/ns/net")
            if space not in tables:
                tables[space] = socket_table(lambda name, pid=pid: _net_lines(pid, name))  # type: ignore[misc]
            inodes = {_socket_inode(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
        found += [replace(entry, pid=pid) for inode, entry in tables[space].items() if inode in inodes]
    return found


def host_sockets() -> list[Socket]:
    """Return the sockets of the network that this process is in."""
    return list(socket_table(lambda name: _net_lines(os.getpid(), name)).values())


def socket_table(lines_of: Callable[[str], list[str]]) -> dict[int, Socket]:
    """Return the sockets by inode, given the lines of tcp, tcp6, udp, udp6 and unix below /proc/PID/net. Pure."""
    table: dict[int, Socket] = {}
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in lines_of(name):
            fields = line.split()
            state = _TCP_STATES[int(fields[3], 16)] if name.startswith("tcp") else ""
            local, remote = _endpoint(fields[1]), _endpoint(fields[2])
            table[int(fields[9])] = Socket(0, name[:3], local, "" if remote.endswith(":0") else remote, state)
    for line in lines_of("unix"):
        fields = line.split(maxsplit=7)
        state = "LISTEN" if int(fields[3], 16) & 0x10000 else ""
        table[int(fields[6])] = Socket(0, "unix", fields[7] if len(fields) > 7 else "", "", state)
    return table


def _net_lines(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/net/{name}").read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    except FileNotFoundError:
        return []  # no such protocol in this kernel


def _endpoint(text: str) -> str:
    """Return `127.0.0.1:8080` for `0100007F:1F90`: each word of an address is in the machine's byte order."""
    words, port = text.split(":")
    data = b"".join(int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8))
    address = socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)
    return f"{address}:{int(port, 16)}" if len(data) == 4 else f"[{address}]:{int(port, 16)}"


def _socket_inode(path: str) -> int:
    try:
        target = os.readlink(path)
    except FileNotFoundError:
        return -1
    return int(target[8:-1]) if target.startswith("socket:[") else -1


def changed_files(stores: list[tuple[str, Path]]) -> list[Changed]:
    """Return what the session wrote, from each overlay's upper layer: (mount point, upper). At most MAX_FILES."""
    found: list[Changed] = []
    for point, upper in stores:
        for directory, inner, names in os.walk(upper):
            links = [name for name in inner if os.path.islink(os.path.join(directory, name))]
            links += [name for name in inner if overlay_redirects.read(os.path.join(directory, name)) is not None]
            for name in names + links:
                path = os.path.join(directory, name)
                shown = os.path.join(point, os.path.relpath(path, upper))
                try:
                    info = os.lstat(path)
                except FileNotFoundError:
                    continue
                if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
                    found.append(Changed(shown, "deleted", 0))
                else:
                    found.append(Changed(shown, "changed" if os.path.lexists(shown) else "added", _size(info)))
                if len(found) >= MAX_FILES:
                    return found
    return found


def _size(info: os.stat_result) -> int:
    return 0 if stat.S_ISDIR(info.st_mode) else info.st_size
