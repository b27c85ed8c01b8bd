"""Kinds of memory."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from tests.plantings.base import Planting, alive, call, child, libc, planting, same


@planting
def secret_memory() -> Planting:
    fd = call(447, 0)
    os.ftruncate(fd, 4096)
    view = mmap.mmap(fd, 4096)
    view[:6] = b"secret"
    yield
    same(view[:6], b"secret")


@planting
def huge_pages() -> Planting:
    address = libc.mmap(None, 2 << 20, 3, 0x40022, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    yield
    ctypes.memset(address, 1, 4096)


@planting
def huge_pages_reserved_not() -> Planting:
    """MAP_NORESERVE works where the machine has no huge page at all."""
    address = libc.mmap(None, 2 << 20, 0, 0x44022, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    yield


@planting
def huge_memfd() -> Planting:
    fd = os.memfd_create("huge", os.MFD_HUGETLB)
    yield
    os.fstat(fd)


@planting
def system_v_segment_removed() -> Planting:
    libc.shmat.restype = ctypes.c_void_p
    memory = libc.shmget(0, 1 << 16, 0o1600)
    address = libc.shmat(memory, None, 0)
    ctypes.memset(address, 7, 100)
    same(libc.shmctl(memory, 0, None), 0)
    yield
    same(ctypes.string_at(address, 3), b"\7\7\7")


@planting
def locked_memory() -> Planting:
    view = mmap.mmap(-1, 1 << 20)
    libc.mlockall(1)
    yield
    view[0] = 1
    same("VmLck:\t       0 kB" in open("/proc/self/status").read(), False)


@planting
def guarded_memory() -> Planting:
    view = libc.mmap(None, 1 << 20, 3, 0x22, -1, 0)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    same(libc.madvise(view, 4096, 102), 0)  # MADV_GUARD_INSTALL
    yield
    ctypes.memset(view + 4096, 1, 9)


@planting
def sealed_memfd() -> Planting:
    fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.write(fd, b"x")
    fcntl.fcntl(fd, 1033, 15)
    yield
    same(fcntl.fcntl(fd, 1034), 15)


@planting
def unnamed_mapping_of_zero() -> Planting:
    fd = os.open("/dev/zero", os.O_RDWR)
    view = mmap.mmap(fd, 4096)
    view[0] = 5
    yield
    same(view[0], 5)


@planting
def mapped_pipe_like_anon() -> Planting:
    """Shared anonymous memory that was inherited, then its maker has ended."""
    view = mmap.mmap(-1, 1 << 16)
    view[:5] = b"hello"
    pid = child(lambda: None)
    yield
    same(view[:5], b"hello")
    alive(pid)
