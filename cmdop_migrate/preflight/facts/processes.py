"""Read the facts of a session's processes that decide whether CRIU can dump them. No process is stopped for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cmdop_migrate.preflight.facts import descriptors, mount_table
from cmdop_migrate.preflight.facts.descriptors import (
    DescriptorFacts,
    is_deleted_file,
    is_odd_device,
    shares_memory,
    shares_place,
)
from cmdop_migrate.preflight.facts.mount_table import MountTable
from cmdop_migrate.preflight.rules.obstacles import Obstacle
from cmdop_migrate.util import proc

__all__ = ["Process", "Tree", "is_deleted_file", "is_odd_device", "read", "shares_memory"]

# Namespaces of which CRIU dumps one for a whole tree; of mount and network namespaces it dumps any number.
_SINGLE = ("user", "uts", "ipc", "cgroup", "time_for_children")
_SCHED_DEADLINE, _POLICY = "6", 38  # the field of /proc/PID/stat, counted from the state
_SIGTRAP = 1 << 4
_DELETED = " (deleted)"


@dataclass(frozen=True)
class Process:
    """Describe one process. `tracer` is 0 when no process traces it; `deleted`: open files without a name, with the
    bytes they take; `obstacles`: (kind, what), of preflight/rules/obstacles.py."""

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
    obstacles: tuple[tuple[str, str], ...] = ()
    unix: frozenset[int] = frozenset()  # inode numbers of its unix sockets, and of its netlink sockets
    netlink: frozenset[int] = frozenset()

    @property
    def shown(self) -> str:
        """Return the process for a message."""
        return f"{self.command} (pid {self.pid})"


@dataclass(frozen=True)
class Tree:
    """Describe the processes of one session. `reads_limits`: root can read the limits of other users' processes on this
    host. `obstacles`: those that belong to no process, beside the processes' own."""

    name: str
    processes: tuple[Process, ...]
    reads_limits: bool
    deleted_limit: int
    obstacles: tuple[Obstacle, ...] = ()


def read(pids: Iterable[int], root_pid: int | None, huge_pages: bool = True) -> tuple[Process, ...]:
    """Return the facts of those processes that live. `root_pid` is the session's first process, whose namespaces are
    the session's. `huge_pages`: whether this host has any."""
    return _TreeReader(list(pids), root_pid, huge_pages).run()


class _TreeReader:
    def __init__(self, pids: list[int], root_pid: int | None, huge_pages: bool) -> None:
        self.pids, self.root_pid, self.huge_pages = pids, root_pid, huge_pages
        self.own = {} if root_pid is None else _namespaces(root_pid)
        self.spaces = {pid: _namespaces(pid) for pid in pids}
        self.tables: dict[str, MountTable] = {}
        for pid, space in self.spaces.items():
            if space.get("mnt", "") not in self.tables:
                self.tables[space.get("mnt", "")] = mount_table.read(pid)

    def run(self) -> tuple[Process, ...]:
        """Read all processes."""
        known = {number for table in self.tables.values() for number in table.mounts}
        read: list[tuple[Process, DescriptorFacts]] = []
        for pid in self.pids:
            try:
                table = self.tables[self.spaces[pid].get("mnt", "")]
                held = descriptors.read(pid, table, known, set(self.pids))
                read.append((self._process(pid, held), held))
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
        return tuple(self._with_shared(read))

    def _process(self, pid: int, held: DescriptorFacts) -> Process:
        status = proc.status(pid)
        spaces = self.spaces[pid]
        is_dead = status.get("State", "").startswith("Z")
        obstacles = {kind for kind in held.obstacles if kind[0] != "huge_pages" or not self.huge_pages}
        for name in _SINGLE if self.own and not is_dead else ():
            if name in spaces and spaces[name] != self.own.get(name, spaces[name]):
                obstacles.add(("namespace", name.removesuffix("_for_children")))
        pending = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
        if pending & _SIGTRAP:
            obstacles.add(("trap", ""))
        if is_dead and int(status.get("Threads", "1")) > 1:
            obstacles.add(("dead_leader", ""))
        if not is_dead:
            obstacles |= set(self._program(pid, int(status.get("PPid", "0"))))
        return Process(
            pid=pid,
            command=status.get("Name", str(pid)),
            uid=int(status.get("Uid", "0").split()[0]),
            tracer=int(status.get("TracerPid", "0")),
            inner_namespace="pid" in spaces and spaces["pid"] != self.own.get("pid", spaces["pid"]),
            io_uring=held.io_uring,
            semaphore=held.semaphore,
            devices=tuple(sorted(held.devices)),
            sockets=tuple(sorted(held.sockets)),
            deleted=tuple(sorted(held.deleted)),
            obstacles=tuple(sorted(obstacles)),
            unix=frozenset(held.unix),
            netlink=frozenset(held.netlink),
        )

    def _program(self, pid: int, parent: int) -> Iterable[tuple[str, str]]:
        exe = os.readlink(f"/proc/{pid}/exe")
        if exe.startswith("/memfd:"):
            yield "memfd_program", exe.removesuffix(_DELETED)
        if parent in self.pids and shares_memory(pid, parent):
            yield "shared_memory", str(parent)
        elif parent in self.pids and shares_place(pid, parent):
            yield "shared_place", str(parent)
        if _policy(pid) == _SCHED_DEADLINE:
            yield "deadline", ""
        if self._cwd_is_hidden(pid):
            yield "hidden_file", os.readlink(f"/proc/{pid}/cwd")
        yield from _mappings(pid, self.huge_pages)

    def _cwd_is_hidden(self, pid: int) -> bool:
        """Tell whether the working directory is hidden by a mount. Only for processes in the session's own mount
        namespace: in another one a path has another meaning."""
        path = os.readlink(f"/proc/{pid}/cwd")
        if self.spaces[pid].get("mnt") != self.own.get("mnt") or not path.startswith("/") or path.endswith(_DELETED):
            return False
        info = os.stat(f"/proc/{pid}/cwd")
        try:
            there = os.stat(f"/proc/{self.root_pid}/root{path}", follow_symlinks=False)
        except OSError:
            return not os.readlink(f"/proc/{pid}/cwd").endswith(_DELETED)  # removed or changed meanwhile
        return (there.st_dev, there.st_ino) != (info.st_dev, info.st_ino) and os.readlink(f"/proc/{pid}/cwd") == path

    def _with_shared(self, read: list[tuple[Process, DescriptorFacts]]) -> Iterable[Process]:
        """Yield the processes with the obstacles that only all of them together show: namespaces without a process, and
        shared epoll sets."""
        lived_in = {link for spaces in self.spaces.values() for link in spaces.values()}
        lived_in |= set(self.own.values())
        polls: set[str] = set()
        for process, held in sorted(read, key=lambda pair: pair[0].pid):
            more = {("kept_namespace", link) for link in held.namespaces - lived_in}
            for watched, missing in held.polls:
                if watched not in polls and missing:  # CRIU reads it from the first process that has the set
                    more.add(("epoll", missing))
                polls.add(watched)
            yield _with(process, more) if more else process


def _with(process: Process, more: set[tuple[str, str]]) -> Process:
    return replace(process, obstacles=tuple(sorted({*process.obstacles, *more})))


def _namespaces(pid: int) -> dict[str, str]:
    links = {}
    for name in ("pid", "mnt", "net", "time", *_SINGLE):
        try:
            links[name] = os.readlink(f"/proc/{pid}/ns/{name}")
        except OSError:
            continue  # it has ended, or this kernel has no such kind
    return links


def _policy(pid: int) -> str:
    """Return the scheduling policy of the first thread: a number of sched(7)."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        words = file.read().rpartition(")")[2].split()
    return words[_POLICY] if len(words) > _POLICY else ""


def _mappings(pid: int, huge_pages: bool) -> Iterable[tuple[str, str]]:
    with open(f"/proc/{pid}/maps", "rb") as file:
        maps = file.read()
    if b"/secretmem (deleted)" in maps:
        yield "secret_memory", ""
    if b"/anon_hugepage (deleted)" in maps and not huge_pages:
        yield "huge_pages", ""
