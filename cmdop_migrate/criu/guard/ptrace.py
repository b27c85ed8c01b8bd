"""Stop, read and change threads of other processes: the few ptrace(2) requests that the dump guard needs.

Every request must come from the OS thread that seized. Stdlib only, and started often: nothing here imports more than
ctypes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import time

_libc = ctypes.CDLL(None, use_errno=True)
_CONT, _DETACH, _SYSCALL = 7, 17, 24
_SEIZE, _INTERRUPT, _LISTEN = 0x4206, 0x4207, 0x4208
_GETREGSET, _SETREGSET, _GETSIGMASK, _SETSIGMASK = 0x4204, 0x4205, 0x420A, 0x420B
O_TRACESYSGOOD, O_TRACEEXIT, O_SUSPEND_SECCOMP = 1, 0x40, 1 << 21
EVENT_EXIT, EVENT_STOP = 6, 128
GENERAL, EXTENDED = 1, 0x202  # register sets: NT_PRSTATUS, NT_X86_XSTATE
WALL = 0x40000000
_PIDFD_GETFD = 438
_LARGEST = 16 << 10  # bytes of a register set
_WORDS = 27  # of 64 bits, in the general set of a 64-bit process
_RAX, _ORIG_RAX, _RIP = 10, 15, 16
_ARGUMENTS = (14, 13, 12, 7, 9, 8)  # rdi, rsi, rdx, r10, r8, r9
_NONE = 2**64 - 1
_RESTARTED, _INTERRUPTED = (512, 513, 514), 516  # ERESTARTSYS, -NOINTR, -NOHAND; -_RESTARTBLOCK
_EINTR = 4
ALL_BUT_TRAP = _NONE & ~(1 << (signal.SIGTRAP - 1))
LOOK_EVERY = 0.0002


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Stuck(Exception):
    """A thread did not stop in time."""


def is_possible() -> bool:
    """Tell whether this machine's registers are known here."""
    return os.uname().machine == "x86_64"


def _request(what: int, thread: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(what, thread, ctypes.c_void_p(address), ctypes.c_void_p(data)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"ptrace {what:#x} of {thread}")


def seize(thread: int, options: int = 0) -> None:
    """Trace a thread without stopping it. It runs on when this process ends."""
    _request(_SEIZE, thread, 0, options)


def interrupt(thread: int) -> None:
    _request(_INTERRUPT, thread)


def resume(thread: int, signal_number: int = 0) -> None:
    _request(_CONT, thread, 0, signal_number)


def listen(thread: int) -> None:
    """Leave a thread in the group stop it reported."""
    _request(_LISTEN, thread)


def detach(thread: int) -> None:
    _request(_DETACH, thread)


def wait(thread: int, until: float) -> int:
    """Return the status of a thread that stopped or ended; Stuck when neither happens `until` then."""
    while True:
        found, status = os.waitpid(thread, WALL | os.WNOHANG)
        if found:
            return status
        if time.monotonic() > until:
            raise Stuck(f"thread {thread}")
        time.sleep(LOOK_EVERY)


def registers(thread: int, kind: int) -> bytes:
    buffer = ctypes.create_string_buffer(_LARGEST)
    vector = _Vector(ctypes.addressof(buffer), _LARGEST)
    _request(_GETREGSET, thread, kind, ctypes.addressof(vector))
    return buffer.raw[: vector.length]


def set_registers(thread: int, kind: int, data: bytes) -> None:
    buffer = ctypes.create_string_buffer(data, len(data))
    vector = _Vector(ctypes.addressof(buffer), len(data))
    _request(_SETREGSET, thread, kind, ctypes.addressof(vector))


def mask(thread: int) -> int:
    """Return the signals that a stopped thread blocks: bit N - 1 for signal N."""
    held = ctypes.c_uint64()
    _request(_GETSIGMASK, thread, 8, ctypes.addressof(held))
    return held.value


def set_mask(thread: int, signals: int) -> None:
    held = ctypes.c_uint64(signals)
    _request(_SETSIGMASK, thread, 8, ctypes.addressof(held))


def restartable(general: bytes) -> bytes:
    """Return registers with which a thread that was interrupted in a system call makes that call again, wherever the
    kernel lets it continue; sleeps that count the time left return EINTR, as after every dump."""
    if len(general) != _WORDS * 8:
        return general  # of a 32-bit process: the kernel restarts the call as the thread is thawed
    words = list(struct.unpack(f"<{_WORDS}Q", general))
    if words[_ORIG_RAX] < 1 << 63:
        error = _NONE + 1 - words[_RAX]
        if error in _RESTARTED:
            words[_RAX] = words[_ORIG_RAX]
            words[_RIP] -= 2
        elif error == _INTERRUPTED:
            words[_RAX] = _NONE + 1 - _EINTR
    words[_ORIG_RAX] = _NONE
    return struct.pack(f"<{_WORDS}Q", *words)


def is_64_bit(general: bytes) -> bool:
    return len(general) == _WORDS * 8


def call(thread: int, general: bytes, instruction: int, until: float, number: int, *arguments: int) -> int:
    """Have a stopped thread make one system call with the `syscall` instruction at that address, and return its result.

    The thread is stopped at the call's exit afterwards; the caller sets its registers. SIGTRAP that was pending for it
    is dropped on the way: CRIU's code leaves one. All other signals must be blocked (`ALL_BUT_TRAP`)."""
    words = list(struct.unpack(f"<{_WORDS}Q", general))
    words[_RAX], words[_ORIG_RAX], words[_RIP] = number, _NONE, instruction
    for place, value in zip(_ARGUMENTS, arguments, strict=False):
        words[place] = value % 2**64
    set_registers(thread, GENERAL, struct.pack(f"<{_WORDS}Q", *words))
    ends = 0
    while ends < 2:  # entry and exit
        _request(_SYSCALL, thread)
        status = wait(thread, until)
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(f"thread {thread} ended")
        ends += os.WSTOPSIG(status) == signal.SIGTRAP | 0x80
    return ctypes.c_int64(struct.unpack_from("<Q", registers(thread, GENERAL), _RAX * 8)[0]).value


def descriptor(process: int, fd: int) -> int:
    """Return a copy of descriptor `fd` of the process that the pidfd `process` refers to; -1 when there is none."""
    return int(_libc.syscall(_PIDFD_GETFD, process, fd, 0))
