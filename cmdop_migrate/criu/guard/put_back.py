"""Record the state of a frozen session's processes before CRIU enters them, and restore it when CRIU died inside them.

CRIU writes its own instructions over a process's first executable page, maps code and opens descriptors in it, blocks
its signals, makes unreadable memory readable and puts TCP connections into repair mode. All of that is undone here
for every thread that CRIU still traced when it died. A thread that CRIU had released is not touched: it has its own
state again, and may have run since.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

from cmdop_migrate.criu import ptrace
from cmdop_migrate.holder import cgroup
from cmdop_migrate.util import proc

_CODE = 256  # bytes that CRIU may write over, at the start of the first executable mapping
_TRAP = 1 << (signal.SIGTRAP - 1)
_CLOSE, _MPROTECT, _MUNMAP, _GETPID, _UMASK = 3, 10, 11, 39, 95
_BLOB = "/memfd:CRIUMFD"  # the name that CRIU gives the mapping of its code
_TCP_REPAIR = 19
_SYSCALL = b"\x0f\x05"
STOPS_WITHIN = 5.0
REPAIRS_WITHIN = 20.0


class Thread:
    """Hold the recorded state of a thread. (No dataclass: importing that takes as long as the rest of the guard.)"""

    def __init__(self, pid: int, general: bytes, extended: bytes, mask: int) -> None:
        """Keep the state; `pid` is the process of the thread."""
        self.pid, self.general, self.extended, self.mask = pid, general, extended, mask


class Process:
    """Hold the recorded state of a process, apart from its threads. `hidden` are the mappings that it cannot read:
    begin, end, protection bits."""

    def __init__(self, pid: int) -> None:
        status = proc.status(pid)
        self.umask, self.stopped = int(status["Umask"], 8), status["State"].startswith("T")
        self.fds = frozenset(os.listdir(f"/proc/{pid}/fd"))
        self.code_at, self.code = 0, b""
        self.hidden: list[tuple[int, int, int]] = []
        for begin, end, protection, _ in _mappings(pid):
            if "x" in protection and not self.code_at:
                self.code_at = begin
            if "r" not in protection:
                self.hidden.append((begin, end, _bits(protection)))
        if self.code_at:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(self.code_at)
                self.code = memory.read(_CODE)


class Snapshot:
    """Hold the state that every thread and process of a cgroup had before the dump."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.threads: dict[int, Thread] = {}
        self.processes: dict[int, Process] = {}

    @classmethod
    def take(cls, group: str) -> Snapshot:
        """Record the state of a frozen group, and block SIGTRAP for all its threads until `release`: the trap with
        which CRIU's code ends would otherwise kill a thread whose tracer died. Raise OSError or ptrace.Stuck."""
        snapshot = cls(group)
        for pid in cgroup.pids(group):
            with contextlib.suppress(
                OSError, KeyError, ValueError
            ):  # its first thread, or the whole process, has just ended
                snapshot.processes[pid] = Process(pid)
        with _Stopped(group) as stopped:
            for thread, pid in stopped.threads.items():
                general = ptrace.register_set(thread, ptrace.GENERAL)
                extended = ptrace.register_set(thread, ptrace.EXTENDED)
                snapshot.threads[thread] = Thread(pid, general, extended, ptrace.mask(thread))
            try:
                for thread, known in snapshot.threads.items():
                    ptrace.set_mask(thread, known.mask | _TRAP)
            except OSError:
                for thread, known in snapshot.threads.items():
                    with contextlib.suppress(OSError):
                        ptrace.set_mask(thread, known.mask)
                raise
        snapshot._settle()
        return snapshot

    def _settle(self) -> None:
        """Wait until the threads of stopped processes are stopped again. CRIU takes a thread that is about to stop for
        a running one, and then waits for it in vain."""
        until = time.monotonic() + STOPS_WITHIN
        for thread, known in self.threads.items():
            if known.pid in self.processes and self.processes[known.pid].stopped:
                while _state(thread) not in ("T", "X", "Z") and time.monotonic() < until:
                    time.sleep(ptrace.POLL_INTERVAL)

    def blocked_trap(self) -> list[int]:
        """Return the threads that blocked SIGTRAP themselves, numbered as in their own pid namespace."""
        threads = []
        for thread, known in self.threads.items():
            if known.mask & _TRAP:
                with contextlib.suppress(OSError):
                    threads.append(proc.inner_pid(thread))
        return threads

    def release(self, damaged: set[int]) -> int:
        """Undo the changes of `take`, and those that CRIU left in the `damaged` threads, which it traced as it died.
        Return the number of repaired threads. The group is frozen before and after. Raise OSError or ptrace.Stuck."""
        with _Stopped(self.group) as stopped:
            for thread in stopped.threads:
                known = self.threads.get(thread)
                if known is not None and not known.mask & _TRAP and thread not in damaged:
                    _unblock_trap(thread)
            to_repair = [thread for thread in stopped.threads if thread in damaged and thread in self.threads]
            if to_repair:
                self._repair(to_repair, stopped)
        return len(to_repair)

    def _repair(self, threads: list[int], stopped: _Stopped) -> None:
        for thread in threads:
            self._set(thread)
        leaders: dict[int, int] = {}
        for thread in threads:
            leaders.setdefault(self.threads[thread].pid, thread)
        for pid in leaders:
            if pid in self.processes:
                _write_code(pid, self.processes[pid])
                _end_tcp_repair(pid)
        try:
            self._clean(threads, leaders, stopped)
        finally:
            for thread in threads:
                with contextlib.suppress(OSError):
                    self._set(thread)
        for pid in leaders:
            if pid in self.processes and self.processes[pid].stopped:
                os.kill(pid, signal.SIGSTOP)

    def _set(self, thread: int) -> None:
        known = self.threads[thread]
        ptrace.set_register_set(thread, ptrace.GENERAL, ptrace.restartable(known.general))
        ptrace.set_register_set(thread, ptrace.EXTENDED, known.extended)
        ptrace.set_mask(thread, known.mask)

    def _clean(self, threads: list[int], leaders: dict[int, int], stopped: _Stopped) -> None:
        """Have each process remove what CRIU's code left in it. The processes execute nothing else meanwhile: all
        threads of the group are stopped."""
        calls: dict[int, list[tuple[int, ...]]] = {}
        for pid, thread in leaders.items():
            if pid in self.processes:
                calls[thread] = _cleanup_calls(pid, self.processes[pid])
        for thread in threads:
            if _has_pending_trap(thread):
                calls.setdefault(thread, []).append((_GETPID,))
        for thread, pending in calls.items():
            known = self.threads[thread]
            if not pending or not ptrace.is_64_bit(known.general):
                continue
            instruction = _syscall_instruction(known.pid)
            ptrace.set_mask(thread, ptrace.ALL_BUT_TRAP)
            for number, *arguments in pending:
                stopped.call(thread, known.general, instruction, number, *arguments)


class _Stopped:
    """Keep all threads of a group seized and stopped; release them at the end of the block, with the group frozen."""

    def __init__(self, group: str) -> None:
        self._group = group
        self.threads: dict[int, int] = {}  # thread: its process
        self._until = time.monotonic() + REPAIRS_WITHIN

    def __enter__(self) -> _Stopped:
        until = time.monotonic() + STOPS_WITHIN
        try:
            for thread in _threads(self._group):
                with contextlib.suppress(OSError):  # it has just ended, or has another tracer
                    _seize(thread)
                    self.threads[thread] = _process_of(thread)
            for thread in list(self.threads):
                if not os.WIFSTOPPED(ptrace.wait(thread, until)):
                    del self.threads[thread]
        except BaseException:
            self.__exit__()
            raise
        return self

    def call(self, thread: int, general: bytes, instruction: int, number: int, *arguments: int) -> int:
        """Make a system call in a thread, as `ptrace.call` does. The group is thawed for it; a lease watchdog may
        freeze it again at any time."""
        if set(_threads(self._group)) - set(self.threads):
            raise ptrace.Stuck("a thread of the session is not stopped")
        cgroup.thaw(self._group)
        try:
            return ptrace.call(thread, general, instruction, self._until, number, *arguments)
        finally:
            cgroup.order_freeze(self._group)

    def __exit__(self, *_: object) -> None:
        cgroup.order_freeze(self._group)
        for thread in self.threads:
            with contextlib.suppress(OSError):
                ptrace.detach(thread)
        until = time.monotonic() + STOPS_WITHIN
        while not cgroup.is_frozen(self._group) and cgroup.pids(self._group) and time.monotonic() < until:
            time.sleep(ptrace.POLL_INTERVAL)


def unblock_trap(group: str, but_for: frozenset[int]) -> None:
    """Unblock SIGTRAP for the threads of a frozen group whose guard was killed, except those that had blocked it
    themselves, numbered as in their own pid namespace."""
    with _Stopped(group) as stopped:
        for thread in stopped.threads:
            with contextlib.suppress(OSError):
                if proc.inner_pid(thread) not in but_for:
                    _unblock_trap(thread)


def _unblock_trap(thread: int) -> None:
    ptrace.set_mask(thread, ptrace.mask(thread) & ~_TRAP)


def _seize(thread: int) -> None:
    """Trace and stop a thread. Its own seccomp filter must not apply to the calls it makes for us."""
    try:
        ptrace.seize(thread, ptrace.O_TRACESYSGOOD | ptrace.O_SUSPEND_SECCOMP)
    except OSError:
        ptrace.seize(thread, ptrace.O_TRACESYSGOOD)
    ptrace.interrupt(thread)


def traced_by(group: str, tracer: int) -> set[int]:
    """Return the threads of the group that this process traces."""
    traced = set()
    for thread in _threads(group):
        with contextlib.suppress(OSError, KeyError):
            if int(proc.status(thread)["TracerPid"]) == tracer:
                traced.add(thread)
    return traced


def _threads(group: str) -> list[int]:
    try:
        with open(f"{group}/cgroup.threads", encoding="ascii") as threads:
            return [int(line) for line in threads]
    except OSError:  # the group has been removed
        return []


def _state(thread: int) -> str:
    try:
        return proc.status(thread)["State"][0]
    except (OSError, KeyError):
        return "X"  # it has ended


def _process_of(thread: int) -> int:
    try:
        return int(proc.status(thread)["Tgid"])
    except (OSError, KeyError):
        return thread


def _has_pending_trap(thread: int) -> bool:
    try:
        return bool(int(proc.status(thread)["SigPnd"], 16) & _TRAP)
    except (OSError, KeyError):
        return False


def _mappings(pid: int) -> list[tuple[int, int, str, str]]:
    mappings = []
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            place, protection, _, _, _, *name = line.rstrip("\n").split(maxsplit=5)
            begin, end = (int(address, 16) for address in place.split("-"))
            if begin < 1 << 63:  # not vsyscall, which is the kernel's
                mappings.append((begin, end, protection, name[0] if name else ""))
    return mappings


def _bits(protection: str) -> int:
    return sum(1 << place for place, letter in enumerate("rwx") if protection[place] == letter)


def _write_code(pid: int, before: Process) -> None:
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(before.code_at)
        if memory.read(len(before.code)) != before.code:
            memory.seek(before.code_at)
            memory.write(before.code)


def _cleanup_calls(pid: int, before: Process) -> list[tuple[int, ...]]:
    """Return the system calls with which a process removes the changes that CRIU left in it."""
    now = _mappings(pid)
    calls: list[tuple[int, ...]] = [(_MUNMAP, begin, end - begin) for begin, end, _, name in now if _BLOB in name]
    for begin, end, protection, name in now:
        for first, last, bits in before.hidden:
            start, stop = max(begin, first), min(end, last)  # once readable, it may have been joined with its neighbour
            if start < stop and _bits(protection) != bits and _BLOB not in name:
                calls.append((_MPROTECT, start, stop - start, bits))
    calls += [(_CLOSE, int(fd)) for fd in os.listdir(f"/proc/{pid}/fd") if fd not in before.fds]
    if int(proc.status(pid)["Umask"], 8) != before.umask:
        calls.append((_UMASK, before.umask))
    return calls


def _syscall_instruction(pid: int) -> int:
    """Return the address of a `syscall` instruction in the vDSO of the process. Raise OSError."""
    for begin, end, _, name in _mappings(pid):
        if name == "[vdso]":
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(begin)
                at = memory.read(end - begin).find(_SYSCALL)
            if at >= 0:
                return begin + at
    raise OSError(f"process {pid} has no vDSO")


def _end_tcp_repair(pid: int) -> None:
    """Take TCP connections that CRIU was reading out of repair mode, so that they send again."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            if not _is_socket(pid, fd):
                continue
            try:
                copy = proc.copy_from_pidfd(process, int(fd))
            except OSError:
                continue  # closed since
            with socket.socket(fileno=copy) as held, contextlib.suppress(OSError):
                is_tcp = held.family in (socket.AF_INET, socket.AF_INET6) and held.type == socket.SOCK_STREAM
                if is_tcp and held.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR):
                    held.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 0)
    finally:
        os.close(process)


def _is_socket(pid: int, fd: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    except OSError:
        return False
