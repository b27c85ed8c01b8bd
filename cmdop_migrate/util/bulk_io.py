"""All of the bytes, at a place in a file; and where they go."""

from __future__ import annotations

import ctypes
import errno
import os

Data = bytes | bytearray | memoryview
_DONTCACHE = 0x80  # RWF_DONTCACHE, Linux 6.14 and later
_UNKNOWN = (errno.EOPNOTSUPP, errno.EINVAL)
_PAGE = 4096


def buffer(size: int) -> bytearray:
    """Zeros that begin where a page does. Where malloc puts a large one, 16 bytes into a page, some processors (AMD's
    with `fsrm`) take seven times as long to copy the kernel's pages into it: 1.7 GB/s, not 12."""
    made = bytearray(size + _PAGE - 1)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(made)) % _PAGE
    del made[:begin], made[size:]  # the first moves its beginning, not its bytes
    return made


def write(fd: int, data: Data, at: int, *, cached: bool = True) -> None:
    """Not `cached`: past the page cache, where the kernel can. Pages for it that were long free are dear on a virtual
    machine, whose hypervisor has to find them first: 1.5 GiB took 1.2 to 2.3 CPU s through the cache, 0.5 s past it. On
    a slow disk they are still there when they are read back."""
    left = memoryview(data).cast("B")
    while left:
        try:
            done = os.pwritev(fd, [left], at, 0 if cached else _DONTCACHE)
        except OSError as error:
            if cached or error.errno not in _UNKNOWN:
                raise
            cached, done = True, 0
        left, at = left[done:], at + done


def read(fd: int, view: memoryview, at: int) -> int:
    """Until `view` is full or the file ends; -> bytes read."""
    total = 0
    while total < len(view):
        done = os.preadv(fd, [view[total:]], at + total)
        if not done:
            break
        total += done
    return total
