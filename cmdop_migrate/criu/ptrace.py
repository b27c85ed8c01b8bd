"""Trace threads of other processes with ptrace(2): stop them, read and change them, make system calls in them (x86-64).

The functions are for the dump guard, which handles thousands of stopped threads; `Task` follows one task from system
call to system call, for the restore. Every request for a thread must come from the OS thread that seized it.

Standard library only, and quick to import: the guard starts beside every dump.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

_libc = ctypes.CDLL(None, use_errno=True)
_CONT, _GETREGS, _SETREGS, _DETACH, _SYSCALL = 7, 12, 13, 17, 24
_GETEVENTMSG, _GETREGSET, _SETREGSET, _SEIZE = 0x4201, 0x4204, 0x4205, 0x4206
_INTERRUPT, _LISTEN, _GETSIGMASK, _SETSIGMASK = 0x4207, 0x4208, 0x420A, 0x420B
O_TRACESYSGOOD, O_TRACEFORKS, O_TRACEEXIT, O_SUSPEND_SECCOMP = 1, 2 | 4 | 8, 0x40, 1 << 21
EVENTS_FORK, EVENT_EXIT, EVENT_STOP = (1, 2, 3), 6, 128  # fork, vfork, clone
GENERAL, EXTENDED = 1, 0x202  # register sets: NT_PRSTATUS, NT_X86_XSTATE
WALL = 0x40000000  # for waitpid: threads too
_LARGEST = 16 << 10  # bytes of a register set
NO_CALL = 2**64 - 1  # as the number of a system call: the kernel makes none
_RESTARTED, _INTERRUPTED = (512, 513, 514), 516  # ERESTARTSYS, -NOINTR, -NOHAND; -_RESTARTBLOCK
_EINTR = 4
ALL_BUT_TRAP = NO_CALL & ~(1 << (signal.SIGTRAP - 1))
POLL_INTERVAL = 0.0002  # seconds between two looks at a thread that is about to stop
_ARGUMENTS = ("rdi", "rsi", "rdx", "r10", "r8", "r9")


_NAMES = """
    r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax
    rip cs eflags rsp ss fs_base gs_base ds es fs gs
"""


class Registers(ctypes.Structure):
    """Hold the general registers of a 64-bit thread (struct user_regs_struct)."""

    _fields_ = [(name, ctypes.c_uint64) for name in _NAMES.split()]


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Stuck(Exception):
    """Signal that a thread does not stop in time."""


class Ended(Exception):
    """Signal that a traced task has ended, or does something unexpected."""


def is_possible() -> bool:
    """Tell whether this module knows the registers of this machine."""
    return os.uname().machine == "x86_64"


def _request(what: int, thread: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(what, thread, ctypes.c_void_p(address), ctypes.c_void_p(data)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"ptrace {what:#x} of {thread}")


def seize(thread: int, options: int = 0) -> None:
    """Trace a thread without stopping it. It keeps running when this process ends."""
    _request(_SEIZE, thread, 0, options)


def interrupt(thread: int) -> None:
    """Have a thread stop soon."""
    _request(_INTERRUPT, thread)


def resume(thread: int, signal_number: int = 0, at_calls: bool = False) -> None:
    """Let a thread run, with this signal; with `at_calls` until the next entry or exit of a system call."""
    _request(_SYSCALL if at_calls else _CONT, thread, 0, signal_number)


def listen(thread: int) -> None:
    """Leave a thread in the group stop it reported."""
    _request(_LISTEN, thread)


def detach(thread: int, signal_number: int = 0) -> None:
    """Stop tracing a stopped thread and let it run, with this signal."""
    _request(_DETACH, thread, 0, signal_number)


def wait(thread: int, until: float) -> int:
    """Return the status of a thread that stopped or ended. Raise Stuck if neither happened by then."""
    while True:
        stopped, status = os.waitpid(thread, WALL | os.WNOHANG)
        if stopped:
            return status
        if time.monotonic() > until:
            raise Stuck(f"thread {thread} does not stop")
        time.sleep(POLL_INTERVAL)


def is_at_call(status: int) -> bool:
    """Tell whether a thread with this status is at the entry or exit of a system call."""
    return os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGTRAP | 0x80


def has_forked(status: int) -> bool:
    """Tell whether a thread with this status has just forked."""
    return status >> 16 in EVENTS_FORK


def passing_signal(status: int) -> int:
    """Return the signal that a thread with this status is about to receive, 0 if it stopped for another reason."""
    return 0 if status >> 16 or is_at_call(status) else os.WSTOPSIG(status)


def register_set(thread: int, kind: int) -> bytes:
    """Return the GENERAL or the EXTENDED registers of a stopped thread."""
    buffer = ctypes.create_string_buffer(_LARGEST)
    vector = _Vector(ctypes.addressof(buffer), _LARGEST)
    _request(_GETREGSET, thread, kind, ctypes.addressof(vector))
    return buffer.raw[: vector.length]


def set_register_set(thread: int, kind: int, data: bytes) -> None:
    """Set the GENERAL or the EXTENDED registers of a stopped thread."""
    buffer = ctypes.create_string_buffer(data, len(data))
    vector = _Vector(ctypes.addressof(buffer), len(data))
    _request(_SETREGSET, thread, kind, ctypes.addressof(vector))


def mask(thread: int) -> int:
    """Return the signals that a stopped thread blocks: bit N - 1 for signal N."""
    signals = ctypes.c_uint64()
    _request(_GETSIGMASK, thread, 8, ctypes.addressof(signals))
    return signals.value


def set_mask(thread: int, signals: int) -> None:
    """Set the signals that a stopped thread blocks."""
    held = ctypes.c_uint64(signals)  # a name keeps it in memory until the request is done
    _request(_SETSIGMASK, thread, 8, ctypes.addressof(held))


def is_64_bit(general: bytes) -> bool:
    """Tell whether these general registers are those of a 64-bit thread."""
    return len(general) == ctypes.sizeof(Registers)


def restartable(general: bytes) -> bytes:
    """Return registers with which a thread that was interrupted in a system call makes that call again when it runs.
    Sleeps that count the time left return EINTR, as after every dump. The kernel itself restarts the call of a 32-bit
    thread when that is thawed."""
    if not is_64_bit(general):
        return general
    regs = Registers.from_buffer_copy(general)
    if regs.orig_rax < 1 << 63:
        error = 2**64 - regs.rax
        if error in _RESTARTED:
            regs.rax = regs.orig_rax
            regs.rip -= 2
        elif error == _INTERRUPTED:
            regs.rax = 2**64 - _EINTR
    regs.orig_rax = NO_CALL
    return bytes(regs)


def make_again(at_entry: Registers) -> Registers:
    """Return registers with which a thread makes once more the system call at whose entry it had these."""
    regs = Registers.from_buffer_copy(at_entry)
    regs.rax, regs.orig_rax, regs.rip = regs.orig_rax, NO_CALL, regs.rip - 2
    return regs


def _calling(before: Registers, instruction: int, number: int, arguments: tuple[int, ...]) -> Registers:
    """Return registers with which a thread makes a system call with the `syscall` instruction at that address."""
    regs = Registers.from_buffer_copy(before)
    regs.rax, regs.orig_rax, regs.rip = number, NO_CALL, instruction
    for name, value in zip(_ARGUMENTS, arguments, strict=False):
        setattr(regs, name, value % 2**64)
    return regs


def call(thread: int, general: bytes, instruction: int, until: float, number: int, *arguments: int) -> int:
    """Have a stopped 64-bit thread make one system call with the `syscall` instruction at that address; return its
    result. Raise Stuck, or ProcessLookupError if the thread ends.

    Afterwards the thread is stopped at the call's exit; the caller sets its registers. A SIGTRAP that was pending for
    the thread is dropped: CRIU's code leaves one. All other signals must be blocked (`ALL_BUT_TRAP`)."""
    regs = _calling(Registers.from_buffer_copy(general), instruction, number, arguments)
    set_register_set(thread, GENERAL, bytes(regs))
    call_stops = 0
    while call_stops < 2:  # entry and exit
        resume(thread, at_calls=True)
        status = wait(thread, until)
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(f"thread {thread} ended")
        call_stops += is_at_call(status)
    return _result(Registers.from_buffer_copy(register_set(thread, GENERAL)))


def _result(at_exit: Registers) -> int:
    return ctypes.c_int64(at_exit.rax).value


class Task:
    """Control one traced task, stopped at the entry or exit of a system call. Failed requests raise Ended."""

    def __init__(self, pid: int, within: float | None = None) -> None:
        """Prepare to trace `pid`. `within`: seconds that each wait for the task may take before Stuck is raised. A task
        in a frozen cgroup never reaches its next system call."""
        self.pid, self.within = pid, within
        self.inside = False  # between entry and exit of a call

    def seize(self, follow: bool = False) -> None:
        """Trace and stop the task. With `follow` its descendants are traced from their first moment."""
        self.attach(O_TRACESYSGOOD | (O_TRACEFORKS if follow else 0))
        self.interrupt()
        self.wait()

    def attach(self, options: int = 0) -> None:
        """Trace the task without stopping it. Of a stopped task the tracer immediately learns which signal stopped
        it."""
        self._request(_SEIZE, 0, options)

    def _request(self, what: int, address: int, data: int) -> None:
        try:
            _request(what, self.pid, address, data)
        except OSError as error:
            raise Ended(f"ptrace {what:#x}: {error.strerror}") from None

    def wait(self) -> int:
        """Wait until the task has stopped and return its status. Raise Ended when it has ended, and Stuck."""
        if self.within is None:
            status = os.waitpid(self.pid, WALL)[1]
        else:
            status = wait(self.pid, time.monotonic() + self.within)
        if not os.WIFSTOPPED(status):
            raise Ended("the task ended")
        return status

    def next(self) -> Registers:
        """Run the task to the next entry or exit of a system call. Signals are delivered on the way."""
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
        """Handle a fork of the task, traced with `follow`; `child` is traced, and about to stop."""

    def resume(self, deliver: int = 0, at_calls: bool = False) -> None:
        """Let the task run, with this signal; with `at_calls` until the next entry or exit of a system call."""
        self._request(_SYSCALL if at_calls else _CONT, 0, deliver)

    def interrupt(self) -> None:
        """Have the task stop soon."""
        self._request(_INTERRUPT, 0, 0)

    def child(self) -> int:
        """Return the process that the task has just forked."""
        number = ctypes.c_ulong()
        self._request(_GETEVENTMSG, 0, ctypes.addressof(number))
        return number.value

    def registers(self) -> Registers:
        """Return the registers of the stopped task."""
        regs = Registers()
        self._request(_GETREGS, 0, ctypes.addressof(regs))
        return regs

    def set(self, regs: Registers) -> None:
        """Set the registers of the stopped task."""
        self._request(_SETREGS, 0, ctypes.addressof(regs))

    def call(self, number: int, *arguments: int) -> int:
        """Make one system call in the task, which is at the exit of another one; return its result."""
        before = self.registers()
        self.set(_calling(before, before.rip - 2, number, arguments))  # on the instruction it has just executed
        self.next()
        result = _result(self.next())
        self.set(before)
        return result

    def must(self, number: int, *arguments: int) -> int:
        """Make one system call as `call` does, and raise Ended when it fails."""
        result = self.call(number, *arguments)
        if result < 0:
            raise Ended(f"system call {number}: {os.strerror(-result)}")
        return result

    def put(self, data: bytes) -> int:
        """Write `data` below the task's stack and return its address. It stays there until the task runs on."""
        address = (self.registers().rsp - 512) & ~15  # the 128 bytes below the stack pointer are the program's
        assert len(data) < 384
        with open(f"/proc/{self.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            memory.write(data)
        return int(address)

    def text(self, address: int) -> bytes:
        """Return the first 256 bytes at most of the C string at this address."""
        return self._memory(address, 256).partition(b"\0")[0]

    def number(self, address: int) -> int:
        """Return the 32-bit number at this address."""
        return int.from_bytes(self._memory(address, 4), "little")

    def _memory(self, address: int, size: int) -> bytes:
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(size)

    def let_go(self, deliver: int = 0) -> None:
        """Stop tracing the stopped task and let it run, with this signal."""
        self._request(_DETACH, 0, deliver)
