"""Find what keeps a session from being dumped that no single process of it shows: sockets that wait or lead outside,
mounts, and processes beside its cgroup."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cmdop_migrate.model import Record
from cmdop_migrate.preflight import mounttable
from cmdop_migrate.preflight.mounttable import MountTable
from cmdop_migrate.preflight.obstacles import Obstacle
from cmdop_migrate.preflight.processes import Machine, Process
from cmdop_migrate.session import cgroup, unixdiag
from cmdop_migrate.session.unixdiag import UnixSocket

_CONNECTED_KINDS = (1, 5)  # SOCK_STREAM, SOCK_SEQPACKET: CRIU lets datagram sockets lead outside


def look(group: str, record: Record, processes: tuple[Process, ...]) -> Iterator[Obstacle]:
    """Find them all. What cannot be read, because its process has just ended, is not there any more."""
    if record.pid is None or not processes:
        return
    yield from _mounts(record, processes)
    yield from _strays(group, processes)
    yield from _netlink(processes)
    yield from _unix(processes)


def machine() -> Machine:
    """Read what decides on this machine whether a mapping can be dumped and restored."""
    pools = Path("/sys/kernel/mm/hugepages").glob("*/nr_hugepages")
    return Machine(any(_number(one) for one in pools), _spare())


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _spare() -> int | None:
    if _number(Path("/proc/sys/vm/overcommit_memory")) != 2:
        return None
    lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) > 1}
    return max(0, sizes.get("CommitLimit", 0) - sizes.get("Committed_AS", 0))


def _mounts(record: Record, processes: Iterable[Process]) -> Iterator[Obstacle]:
    tables: dict[str, MountTable] = {}
    for one in processes:
        try:
            space = os.readlink(f"/proc/{one.pid}/ns/mnt")
        except OSError:
            continue
        if space not in tables:
            tables[space] = mounttable.read(one.pid)
    cannot, lost = mounttable.unknown(tables.values(), (*record.layers, *record.binds))
    if cannot:
        yield Obstacle("mount", ", ".join(sorted(cannot)[:5]))
    if lost:
        yield Obstacle("lost_mount", ", ".join(sorted(lost)[:5]))
    queues = mounttable.message_queues(mounttable.read(record.pid or 0), record.pid or 0)
    if queues:
        yield Obstacle("message_queues", ", ".join(queues[:5]))


def _strays(group: str, processes: tuple[Process, ...]) -> Iterator[Obstacle]:
    """Children of the session's processes that are in another cgroup: they would not be frozen."""
    try:
        inner = sorted(entry.name for entry in os.scandir(group) if entry.is_dir(follow_symlinks=False))
    except OSError:
        inner = []
    if inner:
        yield Obstacle("sub_cgroup", ", ".join(inner[:5]))
        return
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
                sockets |= unixdiag.read(one.pid)
        except OSError:
            continue
    suspects: list[UnixSocket] = []
    for inode, owner in own.items():
        found = sockets.get(inode)
        if found is None:
            continue
        if any(client == 0 or (client in sockets and sockets[client].unread) for client in found.waiting):
            yield Obstacle("unaccepted", found.name or "a socket without a name", owner.pid, owner.command)
        if found.kind in _CONNECTED_KINDS and found.state == unixdiag.ESTABLISHED and found.peer not in (0, *own):
            suspects.append(found)
    yield from _outside(suspects, own, sockets)


def _outside(suspects: list[UnixSocket], own: dict[int, Process], sockets: dict[int, UnixSocket]) -> Iterator[Obstacle]:
    """Connections whose other end a process outside has. An end that no process has is on its way in a message."""
    if not suspects:
        return
    holders = _holders({one.peer for one in suspects}, {one.pid for one in own.values()})
    for one in suspects:
        holder = holders.get(one.peer, "" if one.peer in sockets else "a process")
        if holder:
            owner = own[one.inode]
            yield Obstacle("outside_unix", holder, owner.pid, owner.command)


def _holders(inodes: set[int], not_of: set[int]) -> dict[int, str]:
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, str] = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid in not_of:
            continue
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                inode = wanted.get(os.readlink(f"/proc/{pid}/fd/{fd}"))
                if inode is not None:
                    found[inode] = f"{Path(f'/proc/{pid}/comm').read_text().strip()} (pid {pid})"
        except OSError:
            continue
    return found
