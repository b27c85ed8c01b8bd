"""Read the events of a userfaultfd, and place pages through it.

Constants and layouts are those of linux/userfaultfd.h; the numbers are the same on every architecture that numbers its
ioctls in the common way.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from dataclasses import dataclass

PAGE = 4096
_WAKE, _COPY, _ZEROPAGE = 0x8010AA02, 0xC028AA03, 0xC020AA04
_API, _MAGIC = 0xC018AA3F, 0xAA
_NEEDED = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6  # events: fork, remap, remove, unmap. CRIU calls them uffd-noncoop
_NUMBERS = {"x86_64": 323, "aarch64": 282}
_FAULT, _FORK, _REMAP, _REMOVE, _UNMAP = 0x12, 0x13, 0x14, 0x15, 0x16
_MESSAGE = struct.Struct("<B7x3Q")
_EVENTS_AT_A_TIME = 16
_ANYWHERE, _NOTHING = 1 << 20, PAGE  # the second is below the lowest address that can be mapped
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Fault:
    """Report that a thread waits for the page at `address`."""

    address: int


@dataclass(frozen=True)
class Fork:
    """Report that the process has forked a child, in which the same pages are missing; `fd` is its userfaultfd."""

    fd: int


@dataclass(frozen=True)
class Remap:
    """Report that the process has moved pages with mremap."""

    start: int
    to: int
    size: int


@dataclass(frozen=True)
class Drop:
    """Report that the process has unmapped pages or dropped them with madvise: they read as zeros from now on, or not
    at all."""

    start: int
    end: int


Event = Fault | Fork | Remap | Drop


def is_possible() -> bool:
    """Tell whether this kernel lets us serve a process that does not cooperate. `criu check --feature uffd-noncoop`
    tells the same, but after all its other checks, which take as long as half a restore."""
    number = _NUMBERS.get(platform.machine())
    fd = _libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK) if number is not None else -1
    if fd < 0:
        return False
    try:
        request = bytearray(struct.pack("<QQQ", _MAGIC, 0, 0))
        fcntl.ioctl(fd, _API, request)
    except OSError:
        return False
    finally:
        os.close(fd)
    _, features, _ = struct.unpack("<QQQ", request)
    return bool(features & _NEEDED == _NEEDED)


def read(fd: int) -> list[Event]:
    """Return the pending events, oldest first. The process resumes after its fork, remap or unmap as soon as the event
    has been read."""
    try:
        data = os.read(fd, _MESSAGE.size * _EVENTS_AT_A_TIME)
    except BlockingIOError:
        return []
    return [_event(*fields) for fields in _MESSAGE.iter_unpack(data)]


def _event(kind: int, first: int, second: int, third: int) -> Event:
    if kind == _FAULT:
        return Fault(second & ~(PAGE - 1))
    if kind == _FORK:
        return Fork(first & 0xFFFFFFFF)
    if kind == _REMAP:
        return Remap(first, second, third)
    if kind in (_REMOVE, _UNMAP):
        return Drop(first, second)
    raise ValueError(f"unknown userfaultfd event {kind:#x}")


def address_of(data: bytes) -> int:
    """Return the address of `data` in our memory, valid as long as `data` exists."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def address_in(buffer: bytearray | memoryview) -> int:
    """Return the address of a writable buffer, whose size may not change from now on."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def put(fd: int, at: int, source: int, size: int) -> tuple[int, int]:
    """Place `size` bytes from `source` (0: zeros) at `at` and wake the threads that wait for them. Return the number of
    bytes placed, and errno."""
    if source:
        call, request = _COPY, bytearray(struct.pack("<QQQQq", at, source, size, 0, 0))
    else:
        call, request = _ZEROPAGE, bytearray(struct.pack("<QQQq", at, size, 0, 0))
    try:
        fcntl.ioctl(fd, call, request)
    except OSError as error:
        (done,) = struct.unpack_from("<q", request, len(request) - 8)
        return max(0, done), error.errno or errno.EIO
    return size, 0


def has_ended(fd: int) -> bool:
    """Tell whether the process has ended, or has executed another program. The request copies from an unmapped address,
    so that the kernel changes none of its pages."""
    return put(fd, _ANYWHERE, _NOTHING, PAGE)[1] == errno.ESRCH


def wake(fd: int, start: int, size: int) -> None:
    """Wake the threads that wait for a page there; they try again."""
    fcntl.ioctl(fd, _WAKE, struct.pack("<QQ", start, size))
