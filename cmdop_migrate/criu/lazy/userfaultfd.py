"""userfaultfd: what the kernel says about a process's missing pages, and how they are put there.

Constants and layouts are those of linux/userfaultfd.h; numbers are the same on
every architecture that numbers its ioctls the common way.
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
_NEEDED = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6  # events: fork, remap, remove, unmap. What CRIU calls uffd-noncoop
_NUMBERS = {"x86_64": 323, "aarch64": 282}
_FAULT, _FORK, _REMAP, _REMOVE, _UNMAP = 0x12, 0x13, 0x14, 0x15, 0x16
_MESSAGE = struct.Struct("<B7x3Q")
_AT_ONCE = 16
_ANYWHERE, _NOTHING = 1 << 20, PAGE  # the second is below what the kernel lets anybody map
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Fault:
    """A thread waits for the page at `address`."""

    address: int


@dataclass(frozen=True)
class Fork:
    """A child, with the same pages missing, has a userfaultfd of its own."""

    fd: int


@dataclass(frozen=True)
class Remap:
    start: int
    to: int
    size: int


@dataclass(frozen=True)
class Drop:
    """Unmapped, or given up by madvise: these pages read as zeros from now on, or not at all."""

    start: int
    end: int


Event = Fault | Fork | Remap | Drop


def is_possible() -> bool:
    """Whether this kernel lets us serve a process that does not know of it. CRIU knows too (`criu check --feature
    uffd-noncoop`), after it has looked at all the rest, which takes as long as half a restore."""
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
    """What the kernel has to say, oldest first; nothing when it has nothing. The process goes on with what it was doing
    as soon as this has read of it."""
    try:
        data = os.read(fd, _MESSAGE.size * _AT_ONCE)
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
    """Where it lies in our memory, as long as it is kept."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def address_in(buffer: bytearray | memoryview) -> int:
    """The same of one that is written to; it may not change its size from now on."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def put(fd: int, at: int, source: int, size: int) -> tuple[int, int]:
    """Put `size` bytes from `source` (0: zeros) there and wake who waits; -> (bytes that are there now, errno)."""
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
    """Whether the process is gone, or has begun another program. Asked to copy from where we have nothing, the kernel
    changes none of its pages."""
    return put(fd, _ANYWHERE, _NOTHING, PAGE)[1] == errno.ESRCH


def wake(fd: int, start: int, size: int) -> None:
    """Whoever waits for a page there looks again."""
    fcntl.ioctl(fd, _WAKE, struct.pack("<QQ", start, size))
