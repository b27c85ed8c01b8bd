"""The controlling terminal, for every process of a restored session.

A process has one only by inheriting it when it is forked; CRIU gives it to the
session's leader when all its children exist already. They would lack it for
ever: no job control in any shell, no /dev/tty. So the leader is stopped before
it forks the first, and is made to open the terminal there. What CRIU later
opens as the terminal's master is that one.

CRIU cannot be asked to do it, so this traces its root task (pid 1, the leader)
from before it makes its mounts until it has opened the terminal. CRIU must not
trace it as well, as it does with `rst_sibling`: the root is then the worker's
child, and comes to the holder, a subreaper, when the worker ends. Its wish to
die with its parent waits that long (`let_parent_end`, `die_with_parent`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import threading
import time
from collections.abc import Callable

import psutil

from cmdop_migrate import log
from cmdop_migrate.errors import TimedOut

_log = log.get("criu")
_libc = ctypes.CDLL(None, use_errno=True)

_SEIZE, _SYSCALL, _GETREGS, _SETREGS, _DETACH, _INTERRUPT, _GETEVENTMSG = 0x4206, 24, 12, 13, 17, 0x4207, 0x4201
_O_TRACESYSGOOD, _O_TRACEFORKS = 1, 2 | 4 | 8
_FORKED = (1, 2, 3)  # events: fork, vfork, clone
_WALL = 0x40000000
_CLOSE, _IOCTL, _OPENAT, _FCNTL, _PRCTL = 3, 16, 257, 72, 157
_FORKS = (56, 57, 58, 435)
_PR_SET_PDEATHSIG = 1
_TIOCSPTLCK, _TIOCSCTTY = 0x40045431, 0x540E
_F_DUPFD_CLOEXEC = 1030
_HIGH = 400  # above what a session's first process has open, below where CRIU keeps its own
_AT_FDCWD = -100
_MASTER, _SLAVE = b"/dev/pts/ptmx", b"/dev/pts/0"
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
STEPS = 200_000  # system calls; some hundreds are usual
STUCK = 20.0  # seconds until a task that runs has come to its next system call, on any machine


class _Regs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in _REGISTERS]


class Ended(Exception):
    """The traced task is gone, or does what was not expected of it."""


class _Task:
    """One traced task, standing at a system call."""

    def __init__(self, pid: int, on_fork: Callable[[_Task], None] | None = None, within: float | None = None) -> None:
        """`within`: seconds that each wait for it may take; TimedOut after that. One whose cgroup is frozen never gets
        to its next system call."""
        self.pid, self.on_fork, self.within = pid, on_fork, within
        self.inside = False  # between entry and exit of a call

    def seize(self) -> None:
        self._ptrace(_SEIZE, 0, _O_TRACESYSGOOD | (_O_TRACEFORKS if self.on_fork else 0))
        self._ptrace(_INTERRUPT, 0, 0)
        self._stop()

    def _ptrace(self, what: int, address: int, data: int) -> None:
        if _libc.ptrace(what, self.pid, ctypes.c_void_p(address), ctypes.c_void_p(data)) != 0:
            raise Ended(f"ptrace {what:#x}: {os.strerror(ctypes.get_errno())}")

    def _stop(self) -> int:
        status = _wait(self.pid, self.within)
        if not os.WIFSTOPPED(status):
            raise Ended("the task ended")
        return status

    def next(self) -> _Regs:
        """On to the next entry or exit of a system call; signals pass on their way."""
        deliver = 0
        while True:
            self._ptrace(_SYSCALL, 0, deliver)
            status = self._stop()
            number = os.WSTOPSIG(status)
            if number == signal.SIGTRAP | 0x80:
                self.inside = not self.inside
                return self.registers()
            if self.on_fork is not None and status >> 16 in _FORKED:
                self._follow(self.on_fork)
            deliver = 0 if status >> 16 else number

    def _follow(self, on_fork: Callable[[_Task], None]) -> None:
        """The child is traced from its first moment: `on_fork` has it before it goes its own way."""
        number = ctypes.c_ulong()
        self._ptrace(_GETEVENTMSG, 0, ctypes.addressof(number))
        child = _Task(number.value)
        child._stop()
        on_fork(child)
        child.let_go()

    def registers(self) -> _Regs:
        regs = _Regs()
        self._ptrace(_GETREGS, 0, ctypes.addressof(regs))
        return regs

    def set(self, regs: _Regs) -> None:
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
        address = (self.registers().rsp - 4096) & ~15
        with open(f"/proc/{self.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            memory.write(data)
        return int(address)

    def text(self, address: int) -> bytes:
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(256).partition(b"\0")[0]

    def let_go(self) -> None:
        self._ptrace(_DETACH, 0, 0)


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


def is_possible() -> bool:
    """Whether this machine is of a kind whose registers we know."""
    return platform.machine() == "x86_64"


def let_parent_end(pid: int) -> int:
    """The restored root shall outlive the one who is its parent now -> that one. Nothing happens if it has ended."""
    try:
        parent = psutil.Process(pid).ppid()
        _set_parent_death(pid, 0)
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


def _set_parent_death(pid: int, number: int) -> None:
    task = _Task(pid, within=STUCK)
    task.seize()
    regs = task.next()  # the entry of a call of its own: ours goes first
    before = _Regs.from_buffer_copy(regs)
    regs.orig_rax, regs.rdi, regs.rsi, regs.rdx, regs.r10 = _PRCTL, _PR_SET_PDEATHSIG, number, 0, 0
    task.set(regs)
    task.next()
    before.rax, before.orig_rax, before.rip = before.orig_rax, 2**64 - 1, before.rip - 2
    task.set(before)
    task.let_go()


class Terminal(threading.Thread):
    """Sees to it in a thread of its own: only the one that began to trace may go on."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="ctty", daemon=True)
        self.pid = pid
        self.given = False
        self._opened: list[int] = []  # master, slave: in the leader, until CRIU has its own
        self._seized = threading.Event()

    @classmethod
    def begin(cls, pid: int) -> Terminal:
        """Call it when CRIU says `setup-namespaces`; the root task runs on when CRIU has the answer."""
        terminal = cls(pid)
        terminal.start()
        terminal._seized.wait(10)
        return terminal

    def run(self) -> None:
        task = _Task(self.pid, self._on_fork)
        try:
            task.seize()
        except (Ended, OSError) as error:
            _log.warning("the session's terminal stays with its first process alone: %s", error)
            return
        finally:
            self._seized.set()
        try:
            self._give(task)
            self.given = True
        except (Ended, OSError) as error:
            _log.warning("the session's terminal stays with its first process alone: %s", error)
        try:
            task.let_go()
        except Ended:
            return  # with the restore: CRIU says why

    def _give(self, task: _Task) -> None:
        regs = _until_forks(task)
        before = _Regs.from_buffer_copy(regs)
        regs.orig_rax = 2**64 - 1  # the fork waits
        task.set(regs)
        task.next()
        try:
            self._open(task, self._opened)
        except Ended:
            self._on_fork(task)
            raise
        finally:
            before.rax, before.orig_rax, before.rip = before.orig_rax, 2**64 - 1, before.rip - 2
            task.set(before)
        master, slave = self._opened
        regs = _until_opens(task, b"ptmx")
        regs.orig_rax = 2**64 - 1  # not another one
        task.set(regs)
        regs = task.next()
        regs.rax = master
        task.set(regs)
        _until_opens(task, _SLAVE.lstrip(b"/"))
        task.next()
        task.must(_CLOSE, slave)

    def _on_fork(self, task: _Task) -> None:
        for fd in self._opened:
            task.call(_CLOSE, fd)

    def _open(self, task: _Task, opened: list[int]) -> None:
        master = task.put(_MASTER + b"\0" + _SLAVE + b"\0" + bytes(8))
        slave = master + len(_MASTER) + 1
        zero = slave + len(_SLAVE) + 1
        flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
        opened.append(_high(task, task.must(_OPENAT, _AT_FDCWD, master, flags, 0)))
        task.must(_IOCTL, opened[0], _TIOCSPTLCK, zero)
        opened.append(_high(task, task.must(_OPENAT, _AT_FDCWD, slave, flags, 0)))
        task.must(_IOCTL, opened[1], _TIOCSCTTY, 0)


def _until_forks(task: _Task) -> _Regs:
    """To the entry of the fork of its first child in the session's own mounts; the helpers CRIU runs before have the
    host's terminals."""
    host = os.stat("/dev/pts").st_dev
    for _ in range(STEPS):
        regs = task.next()
        if task.inside and regs.orig_rax in _FORKS:
            try:
                if os.stat(f"/proc/{task.pid}/root/dev/pts").st_dev != host:
                    return regs
            except FileNotFoundError:
                continue
    raise Ended("it forks no child")


def _until_opens(task: _Task, end: bytes) -> _Regs:
    """To the entry of the call that opens a file whose path ends so."""
    for _ in range(STEPS):
        regs = task.next()
        if task.inside and regs.orig_rax == _OPENAT and task.text(regs.rsi).endswith(end):
            return regs
    raise Ended(f"it does not open {end!r}")


def _high(task: _Task, fd: int) -> int:
    copy = task.must(_FCNTL, fd, _F_DUPFD_CLOEXEC, _HIGH)
    task.must(_CLOSE, fd)
    return copy
