"""A live session looked at from its host: processes, descriptors, sockets, changed files."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from cmdop_migrate.session import cgroup

MAX_FILES = 1000


@dataclass(frozen=True)
class Process:
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
    pid: int
    kind: str
    local: str
    remote: str
    state: str


@dataclass(frozen=True)
class Changed:
    path: str
    change: Literal["added", "changed", "deleted"]
    size: int


def processes(group: str) -> list[Process]:
    found = []
    for pid in cgroup.pids(group):
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                found.append(
                    Process(
                        pid=pid,
                        inner_pid=_inner_pid(pid),
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
    return sorted(found, key=lambda one: one.inner_pid)


def rss(group: str) -> int:
    """Bytes resident, all processes added up; cheap enough for a list of many sessions."""
    total = 0
    for pid in cgroup.pids(group):
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
    return total * os.sysconf("SC_PAGE_SIZE")


def sockets(group: str) -> list[Socket]:
    found = []
    for pid in cgroup.pids(group):
        try:
            connections = psutil.Process(pid).net_connections("all")
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue
        for one in connections:
            kind = {1: "tcp", 2: "udp"}.get(int(one.type), str(one.type)) if one.family != 1 else "unix"
            found.append(Socket(pid, kind, _address(one.laddr), _address(one.raddr), one.status))
    return found


def changed_files(stores: list[tuple[str, Path]]) -> list[Changed]:
    """What the session wrote, from each overlay's upper layer: (mount point, upper)."""
    found: list[Changed] = []
    for point, upper in stores:
        for directory, _, names in os.walk(upper):
            for name in names:
                path = os.path.join(directory, name)
                shown = os.path.join(point, os.path.relpath(path, upper))
                try:
                    info = os.lstat(path)
                except FileNotFoundError:
                    continue
                if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
                    found.append(Changed(shown, "deleted", 0))
                else:
                    found.append(Changed(shown, "changed" if os.path.lexists(shown) else "added", info.st_size))
                if len(found) >= MAX_FILES:
                    return found
    return found


def _inner_pid(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid


def _address(address: object) -> str:
    if isinstance(address, tuple) and address:
        return f"{address[0]}:{address[1]}"
    return str(address) if address else ""
