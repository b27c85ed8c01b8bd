"""Find what keeps a session from being dumped that no single process of it shows: sockets that wait or lead outside,
mounts, and processes beside its cgroup."""

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
    """Find them all. What cannot be read, because its process has just ended, is not there any more."""
    if record.pid is None or not processes:
        return
    yield from _mounts(record, processes)
    yield from _strays(group, processes)
    yield from _netlink(processes)
    yield from _unix(processes)


def has_huge_pages() -> bool:
    """Whether this machine keeps huge pages for programs (vm.nr_hugepages)."""
    return any(_number(pool) for pool in Path("/sys/kernel/mm/hugepages").glob("*/nr_hugepages"))


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _mounts(record: Record, processes: Iterable[Process]) -> Iterator[Obstacle]:
    tables: dict[str, MountTable] = {}
    for one in processes:
        try:
            space = os.readlink(f"/proc/{one.pid}/ns/mnt")
        except OSError:
            continue
        if space not in tables:
            tables[space] = mount_table.read(one.pid)
    cannot, lost = mount_table.unknown(tables.values(), (*record.layers, *record.binds))
    if cannot:
        yield Obstacle("mount", ", ".join(sorted(cannot)[:5]))
    if lost:
        yield Obstacle("lost_mount", ", ".join(sorted(lost)[:5]))
    queues = mount_table.message_queues(mount_table.read(record.pid or 0), record.pid or 0)
    if queues:
        yield Obstacle("message_queues", ", ".join(queues[:5]))


def _strays(group: str, processes: tuple[Process, ...]) -> Iterator[Obstacle]:
    """Children of the session's processes that are in another cgroup: they would not be frozen."""
    with contextlib.suppress(OSError):
        if inner := cgroup.inner_groups(group):
            yield Obstacle("sub_cgroup", ", ".join(inner[:5]))
    known = {one.pid for one in processes}
    strange = {child for one in processes for child in _children(one.pid)} - known
    for pid in strange - set(cgroup.pids(group)) if strange else ():  # else it was started while we looked
        try:
            if Path(f"/proc/{pid}/status").read_text().find("State:\tZ") < 0:
                yield Obstacle("outside_cgroup", "", pid, Path(f"/proc/{pid}/comm").read_text().strip())
        except OSError:
            continue


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found |= set(map(int, file.read().split()))
    except OSError:
        return found
    return found


def _netlink(processes: tuple[Process, ...]) -> Iterator[Obstacle]:
    """Messages from the kernel that a program has not read yet."""
    for one in processes:
        if not one.netlink:
            continue
        try:
            lines = Path(f"/proc/{one.pid}/net/netlink").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]
        if any(int(row[9]) in one.netlink and int(row[4]) for row in rows if len(row) > 9):
            yield Obstacle("netlink_news", "", one.pid, one.command)


def _unix(processes: tuple[Process, ...]) -> Iterator[Obstacle]:
    own = {inode: one for one in reversed(processes) for inode in one.unix}
    if not own:
        return
    sockets: dict[int, UnixSocket] = {}
    seen: set[str] = set()
    for one in processes:
        try:
            space = os.readlink(f"/proc/{one.pid}/ns/net") if one.unix else ""
            if space and space not in seen:
                seen.add(space)
                sockets |= unix_sockets.read(one.pid)
        except OSError:
            continue
    queued = {client for one in sockets.values() for client in one.waiting}
    peers: dict[int, Process] = {}  # of sockets that no process of the session has
    for inode, owner in own.items():
        found = sockets.get(inode)
        if found is None:
            if _has_socket(owner.pid, inode):  # else it was closed meanwhile
                yield Obstacle("foreign_unix", "", owner.pid, owner.command)
            continue
        if any(client == 0 or (client in sockets and sockets[client].unread) for client in found.waiting):
            yield Obstacle("unaccepted", found.name or "a socket without a name", owner.pid, owner.command)
        if found.is_dangling and inode not in queued:
            yield Obstacle("outside_unix", "a process that has not accepted it", owner.pid, owner.command)
        elif found.peer and found.peer not in own:
            if found.kind == socket.SOCK_DGRAM and (service := sockets.get(found.peer)) and service.name:
                yield Obstacle("host_service", service.name, owner.pid, owner.command)  # CRIU connects it by name
            else:
                peers[found.peer] = owner
    yield from _outside(peers, {one.pid for one in processes}, sockets)


def _has_socket(pid: int, inode: int) -> bool:
    return inode in _sockets_of(pid)


def _sockets_of(pid: int) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                link = os.readlink(f"/proc/{pid}/fd/{fd}")
                if link.startswith("socket:["):
                    found.add(int(link[8:-1]))
    return found


def _outside(peers: dict[int, Process], session: set[int], sockets: dict[int, UnixSocket]) -> Iterator[Obstacle]:
    """Connections whose other end a process outside has. An end that no process has is on its way in a message."""
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
