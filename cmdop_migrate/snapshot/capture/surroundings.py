"""Find obstacles to a dump that no single process shows: pending or outside sockets, mounts, and processes outside
the session's cgroup."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from cmdop_migrate.holder import cgroup
from cmdop_migrate.model import Record
from cmdop_migrate.preflight.facts import mount_table
from cmdop_migrate.preflight.facts.mount_table import MountTable
from cmdop_migrate.preflight.facts.processes import Process
from cmdop_migrate.preflight.rules.obstacles import Obstacle
from cmdop_migrate.session import unix_sockets
from cmdop_migrate.session.unix_sockets import UnixSocket


def look(group: str, record: Record, processes: tuple[Process, ...]) -> Iterator[Obstacle]:
    """Yield all such obstacles. A file that cannot be read belongs to a process that has just ended, and is skipped."""
    if record.pid is None or not processes:
        return
    yield from _mounts(record, processes)
    yield from _strays(group, processes)
    yield from _netlink(processes)
    yield from _unix(processes)


def has_huge_pages() -> bool:
    """Return whether this machine reserves huge pages for programs (vm.nr_hugepages)."""
    return any(_number(pool) for pool in Path("/sys/kernel/mm/hugepages").glob("*/nr_hugepages"))


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _mounts(record: Record, processes: Iterable[Process]) -> Iterator[Obstacle]:
    tables: dict[str, MountTable] = {}
    for process in processes:
        try:
            namespace = os.readlink(f"/proc/{process.pid}/ns/mnt")
        except OSError:
            continue
        if namespace not in tables:
            tables[namespace] = mount_table.read(process.pid)
    cannot, lost = mount_table.unknown(tables.values(), (*record.layers, *record.binds))
    if cannot:
        yield Obstacle("mount", ", ".join(sorted(cannot)[:5]))
    if lost:
        yield Obstacle("lost_mount", ", ".join(sorted(lost)[:5]))
    queues = mount_table.message_queues(mount_table.read(record.pid or 0), record.pid or 0)
    if queues:
        yield Obstacle("message_queues", ", ".join(queues[:5]))


def _strays(group: str, processes: tuple[Process, ...]) -> Iterator[Obstacle]:
    """Yield the children of the session's processes that are in another cgroup: they would not be frozen."""
    with contextlib.suppress(OSError):
        if inner := cgroup.inner_groups(group):
            yield Obstacle("sub_cgroup", ", ".join(inner[:5]))
    known = {process.pid for process in processes}
    unknown = {child for process in processes for child in _children(process.pid)} - known
    # A child that is in the cgroup by now was started during the check.
    for pid in unknown - set(cgroup.pids(group)) if unknown else ():
        try:
            if Path(f"/proc/{pid}/status").read_text().find("State:\tZ") < 0:
                yield Obstacle("outside_cgroup", "", pid, Path(f"/proc/{pid}/comm").read_text().strip())
        except OSError:
            continue


def _children(pid: int) -> set[int]:
    children: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                children |= set(map(int, file.read().split()))
    except OSError:
        return children
    return children


def _netlink(processes: tuple[Process, ...]) -> Iterator[Obstacle]:
    """Yield the processes that have netlink messages from the kernel which they have not read yet."""
    for process in processes:
        if not process.netlink:
            continue
        try:
            lines = Path(f"/proc/{process.pid}/net/netlink").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]
        if any(int(row[9]) in process.netlink and int(row[4]) for row in rows if len(row) > 9):
            yield Obstacle("netlink_news", "", process.pid, process.command)


def _unix(processes: tuple[Process, ...]) -> Iterator[Obstacle]:
    own = {inode: process for process in reversed(processes) for inode in process.unix}
    if not own:
        return
    sockets: dict[int, UnixSocket] = {}
    seen: set[str] = set()
    for process in processes:
        try:
            namespace = os.readlink(f"/proc/{process.pid}/ns/net") if process.unix else ""
            if namespace and namespace not in seen:
                seen.add(namespace)
                sockets |= unix_sockets.read(process.pid)
        except OSError:
            continue
    queued = {client for unix_socket in sockets.values() for client in unix_socket.waiting}
    peers: dict[int, Process] = {}  # sockets that no process of the session has, and the process connected to each
    for inode, owner in own.items():
        unix_socket = sockets.get(inode)
        if unix_socket is None:
            if _has_socket(owner.pid, inode):  # otherwise it was closed meanwhile
                yield Obstacle("foreign_unix", "", owner.pid, owner.command)
            continue
        if any(client == 0 or (client in sockets and sockets[client].unread) for client in unix_socket.waiting):
            yield Obstacle("unaccepted", unix_socket.name or "a socket without a name", owner.pid, owner.command)
        if unix_socket.is_dangling and inode not in queued:
            yield Obstacle("outside_unix", "a process that has not accepted it", owner.pid, owner.command)
        elif unix_socket.peer and unix_socket.peer not in own:
            if unix_socket.kind == socket.SOCK_DGRAM and (service := sockets.get(unix_socket.peer)) and service.name:
                yield Obstacle("host_service", service.name, owner.pid, owner.command)  # CRIU connects it by name
            else:
                peers[unix_socket.peer] = owner
    yield from _outside(peers, {process.pid for process in processes}, sockets)


def _has_socket(pid: int, inode: int) -> bool:
    return inode in _sockets_of(pid)


def _sockets_of(pid: int) -> set[int]:
    inodes: set[int] = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                link = os.readlink(f"/proc/{pid}/fd/{fd}")
                if link.startswith("socket:["):
                    inodes.add(int(link[8:-1]))
    return inodes


def _outside(peers: dict[int, Process], session: set[int], sockets: dict[int, UnixSocket]) -> Iterator[Obstacle]:
    """Yield the connections whose other end belongs to a process outside the session. An end that no process has is in
    a message that has not been received yet."""
    if not peers:
        return
    holders: dict[int, str] = {}
    for pid in {int(name) for name in os.listdir("/proc") if name.isdigit()} - session:
        for inode in _sockets_of(pid) & peers.keys():
            with contextlib.suppress(OSError):
                holders[inode] = f"{Path(f'/proc/{pid}/comm').read_text().strip()} (pid {pid})"
    for inode, owner in peers.items():
        holder = holders.get(inode, "" if inode in sockets else "a process")
        if holder:
            yield Obstacle("outside_unix", holder, owner.pid, owner.command)
