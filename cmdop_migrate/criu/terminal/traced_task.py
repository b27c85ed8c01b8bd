"""Trace a task and make system calls in it (x86-64): `controlling_tty` does so with the tasks of a restore.

The task that becomes process 1 of a restored session is traced by us from
before it makes its mounts until it has opened its terminals. CRIU must not
trace it as well, as it does with `rst_sibling`: the root is then the worker's
child, and comes to the holder, a subreaper, when the worker ends. Its wish to
die with its parent waits that long (`let_parent_end`, `die_with_parent`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import time

import psutil

from cmdop_migrate.errors import TimedOut

_libc = ctypes.CDLL(None, use_errno=True)

_SEIZE, _CONT, _SYSCALL, _GETREGS, _SETREGS, _DETACH, _INTERRUPT, _GETEVENTMSG = (
    *(0x4206, 7, 24, 12, 13, 17, 0x4207, 0x4201),
)
_O_TRACESYSGOOD, _O_TRACEFORKS = 1, 2 | 4 | 8
_FORKED = (1, 2, 3)  # events: fork, vfork, clone
_WALL = 0x40000000
_PRCTL, _CLOSE_RANGE = 157, 436
_PR_SET_PDEATHSIG = 1
_REGISTERS = (
    *(
        "r15",
        "r14",
        "r13",
        "r12",
        "rbp",
        "rbx",
        "r11",
        "r10",
        "r9",
        "r8",
        "rax",
        "rcx",
        "rdx",
        "rsi",
        "rdi",
        "orig_rax",
    ),
    *("rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
)


STUCK = 20.0  # seconds until a task that runs has come to its next system call, on any machine


class Regs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in _REGISTERS]


class Ended(Exception):
    """The traced task is gone, or does what was not expected of it."""


class Task:
    """One traced task, stopped at a system call."""

    def __init__(self, pid: int, within: float | None = None) -> None:
        """`within`: seconds that each wait for it may take, TimedOut is raised after that. A task in a frozen cgroup
        never gets to its next system call."""
        self.pid, self.within = pid, within
        self.inside = False  # between entry and exit of a call

    def seize(self, follow: bool = False) -> None:
        """Trace and stop it. With `follow` its children are traced from their first moment, and so are theirs."""
        self.attach(_O_TRACESYSGOOD | (_O_TRACEFORKS if follow else 0))
        self.interrupt()
        self.wait()

    def attach(self, options: int = 0) -> None:
        """Trace it without stopping it; the tracer of a stopped task is told at once by which signal it was stopped."""
        self._ptrace(_SEIZE, 0, options)

    def _ptrace(self, what: int, address: int, data: int) -> None:
        if _libc.ptrace(what, self.pid, ctypes.c_void_p(address), ctypes.c_void_p(data)) != 0:
            raise Ended(f"ptrace {what:#x}: {os.strerror(ctypes.get_errno())}")

    def wait(self) -> int:
        """Wait until it has stopped -> its status. Raises Ended when it has ended, TimedOut."""
        status = _wait(self.pid, self.within)
        if not os.WIFSTOPPED(status):
            raise Ended("the task ended")
        return status

    def next(self) -> Regs:
        """On to the next entry or exit of a system call; signals pass on their way."""
        deliver = 0
        while True:
            self.resume(deliver, at_calls=True)
            status = self.wait()
            if is_at_call(status):
                self.inside = not self.inside
                return self.registers()
            if has_forked(status):
                self.on_fork(self.child())
            deliver = passing_signal(status)

    def on_fork(self, child: int) -> None:
        """Called when it has forked while traced with `follow`; `child` is traced, and about to stop."""

    def resume(self, deliver: int = 0, at_calls: bool = False) -> None:
        """Let it run, with this signal; with `at_calls` to the next entry or exit of a system call."""
        self._ptrace(_SYSCALL if at_calls else _CONT, 0, deliver)

    def interrupt(self) -> None:
        """Have it stop soon."""
        self._ptrace(_INTERRUPT, 0, 0)

    def child(self) -> int:
        """-> the process it has just forked."""
        number = ctypes.c_ulong()
        self._ptrace(_GETEVENTMSG, 0, ctypes.addressof(number))
        return number.value

    def registers(self) -> Regs:
        regs = Regs()
        self._ptrace(_GETREGS, 0, ctypes.addressof(regs))
        return regs

    def set(self, regs: Regs) -> None:
        self._ptrace(_SETREGS, 0, ctypes.addressof(regs))

    def call(self, number: int, *arguments: int) -> int:
        """Makes one system call in the task, which stands at the exit of another."""
        before, regs = self.registers(), self.registers()
        regs.rip -= 2  # back onto the instruction it has just come from
        regs.rax, regs.orig_rax = number, 2**64 - 1
        for name, value in zip(("rdi", "rsi", "rdx", "r10"), arguments, strict=False):
            setattr(regs, name, value % 2**64)
        self.set(regs)
        self.next()
        result = ctypes.c_int64(self.next().rax).value
        self.set(before)
        return result

    def must(self, number: int, *arguments: int) -> int:
        result = self.call(number, *arguments)
        if result < 0:
            raise Ended(f"system call {number}: {os.strerror(-result)}")
        return result

    def put(self, data: bytes) -> int:
        """-> the address of `data` in the task, below its stack, until the next call of its own."""
        address = (self.registers().rsp - 512) & ~15  # the 128 bytes below the stack pointer are the program's
        assert len(data) < 384
        with open(f"/proc/{self.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            memory.write(data)
        return int(address)

    def text(self, address: int) -> bytes:
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(256).partition(b"\0")[0]

    def number(self, address: int) -> int:
        """-> the 32-bit number at this address."""
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return int.from_bytes(memory.read(4), "little")

    def let_go(self, deliver: int = 0) -> None:
        self._ptrace(_DETACH, 0, deliver)


def _wait(pid: int, within: float | None) -> int:
    """Return the status of a traced task that has stopped or ended; TimedOut when neither happens `within` seconds."""
    if within is None:
        return os.waitpid(pid, _WALL)[1]
    until = time.monotonic() + within
    while True:
        found, status = os.waitpid(pid, _WALL | os.WNOHANG)
        if found:
            return status
        if time.monotonic() > until:
            raise TimedOut(f"process {pid} of the restored session does not run", "It is parked: restore it again.")
        time.sleep(0.0002)


def is_at_call(status: int) -> bool:
    """Whether a task with this status is at the entry or exit of a system call."""
    return os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGTRAP | 0x80


def has_forked(status: int) -> bool:
    return status >> 16 in _FORKED


def passing_signal(status: int) -> int:
    """-> the signal that a task with this status is about to receive; 0 when it stopped for another reason."""
    return 0 if status >> 16 or is_at_call(status) else os.WSTOPSIG(status)


def is_possible() -> bool:
    """Whether this machine is of a kind whose registers we know."""
    return platform.machine() == "x86_64"


def let_parent_end(pid: int, lent: range = range(0)) -> int:
    """Let the restored process 1 outlive its present parent -> that parent's pid, 0 if process 1 has ended.

    `lent` are descriptors that are not the session's own: process 1 closes them first. If this command is killed in
    between, process 1 ends with its parent."""
    try:
        parent = psutil.Process(pid).ppid()
        _set_parent_death(pid, 0, lent)
    except (psutil.NoSuchProcess, Ended):
        return 0
    return parent


def die_with_parent(pid: int, before: int, within: float = 5.0) -> None:
    """When the restored root has come to the holder, from `before`: from then on it ends with that."""
    until = time.monotonic() + within
    try:
        while psutil.Process(pid).ppid() == before and time.monotonic() < until:
            time.sleep(0.001)
        _set_parent_death(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, Ended):
        return  # it has ended, as its holder will say


def _set_parent_death(pid: int, number: int, lent: range = range(0)) -> None:
    task = Task(pid, within=STUCK)
    task.seize()
    regs = task.next()  # the entry of a call of its own: ours go first
    before = Regs.from_buffer_copy(regs)
    if lent:
        regs.orig_rax, regs.rdi, regs.rsi, regs.rdx = _CLOSE_RANGE, lent.start, lent.stop - 1, 0
    else:
        regs.orig_rax, regs.rdi, regs.rsi, regs.rdx, regs.r10 = _PRCTL, _PR_SET_PDEATHSIG, number, 0, 0
    task.set(regs)
    task.next()
    if lent:
        task.call(_PRCTL, _PR_SET_PDEATHSIG, number, 0, 0)
    before.rax, before.orig_rax, before.rip = before.orig_rax, 2**64 - 1, before.rip - 2
    task.set(before)
    task.let_go()
