"""Call the kernel where Python 3.11 has no function for it."""

from __future__ import annotations

import ctypes
import os
import signal
import time

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 0x1000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18
MNT_DETACH = 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def signal_name(number: int) -> str:
    """Return SIGKILL, for example. Most real-time signals have no more than a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent() -> None:
    """Ask for SIGKILL when the process that forked us ends. That holds until a change of user; init asks again after
    it."""
    _check(_libc.prctl(1, 9, 0, 0, 0), "prctl")


def hear_of_parents_end(number: int) -> None:
    """Ask for this signal when the thread that forked us ends."""
    _check(_libc.prctl(1, number, 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Become the parent of our children's children when those end, instead of the machine's init."""
    _check(_libc.prctl(36, 1, 0, 0, 0), "prctl")


def few_heaps(count: int) -> None:
    """Limit the heaps of threads started from now on. The C library gives each thread a heap, and memory that one has
    freed the others cannot use. A C library other than glibc has no such call."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(-8, count)  # M_ARENA_MAX


def unshare(flags: int) -> None:
    """Leave namespaces of these kinds for new ones. Raise OSError."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace that `fd` refers to. Raise OSError."""
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """Mount a file system. Raise OSError."""

    def encoded(text: str | None) -> bytes | None:
        return None if text is None else os.fsencode(text)

    result = _libc.mount(encoded(source), encoded(target), encoded(kind), ctypes.c_ulong(flags), encoded(data))
    _check(result, f"mount {kind or source or ''} on {target}")


def umount(target: str, flags: int = 0) -> None:
    """Unmount a file system. Raise OSError."""
    _check(_libc.umount2(os.fsencode(target), flags), f"umount {target}")


class _Timer(ctypes.Structure):
    _fields_ = [
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("s", ctypes.c_long),
        ("ns", ctypes.c_long),
    ]


def boottime_timer() -> int:
    """Return a descriptor that becomes readable at a time on CLOCK_BOOTTIME; Python 3.11 has no timerfd."""
    fd: int = _libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        _check(fd, "timerfd_create")
    return fd


def set_timer(fd: int, at: float) -> None:
    """Set the timer to an absolute time; one that has passed fires immediately."""
    whole = max(0, int(at))
    timer = _Timer(0, 0, whole, max(1, int((at - whole) * 1e9)))
    _check(_libc.timerfd_settime(fd, 1, ctypes.byref(timer), None), "timerfd_settime")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root directory and move the old one to `old`. Raise OSError."""
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(number, os.fsencode(new), os.fsencode(old)), "pivot_root")
