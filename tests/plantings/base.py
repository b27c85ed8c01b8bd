"""Small programs that each hold one thing of which `plan` must know whether it can move.

    python -m tests.plantings NAME

It plants the thing, prints `planted`, reads a line, looks whether it still has the thing, and prints `ok`, or `bad:`
and what is wrong. Each is a generator that yields when the thing is planted; what comes after is the look. Here is
what they share; numbers of system calls are those of x86-64.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Generator
from typing import Any

Planting = Generator[None, None, None]
PLANTINGS: dict[str, Callable[[], Planting]] = {}
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
kept: list[Any] = []


def planting(function: Callable[[], Planting]) -> Callable[[], Planting]:
    PLANTINGS[function.__name__] = function
    return function


def same(got: Any, wanted: Any) -> None:
    if got != wanted:
        raise AssertionError(f"{got!r:.200} instead of {wanted!r:.200}")


def call(number: int, *args: Any) -> int:
    """A system call by its number on x86-64; raises OSError."""
    done = libc.syscall(ctypes.c_long(number), *args)
    if done < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return int(done)


def child(work: Callable[[], None]) -> int:
    """A child that does `work`, says so, and waits; it ends with its parent. Returns its pid once it has done that."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        same(os.read(read, 9), b"done")
        os.close(read)
        return pid
    try:
        libc.prctl(1, signal.SIGKILL)
        work()
        os.write(write, b"done")
        os.close(write)
        os.close(read)
        while True:
            signal.pause()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def alive(pid: int) -> None:
    same(os.waitpid(pid, os.WNOHANG), (0, 0))


NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET, NEWTIME = 0x10000000, 0x20000000, 0x40000000, 0x80


def unshare(flags: int) -> None:
    call(272, flags)


def until_executed(pid: int) -> None:
    own = os.readlink("/proc/self/exe")
    while os.readlink(f"/proc/{pid}/exe") == own:
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(one) for one in open(f"/proc/{pid}/task/{pid}/children").read().split()]
