"""Define what a worker process holds: one class per kind of state, found by name in KINDS.

A holding is built once, by the process that owns it. `early` ones are built before the owner forks its children, which
then report it, too. `report` describes it without changing it; `use` and `check` are the new work after a restore.
Standard library only: this runs inside the session, without the project.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import random
import sys
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
]
LIBC.mprotect.argtypes = LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.mlock.argtypes = LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.syscall.restype = ctypes.c_long

KINDS: dict[str, type[Holding]] = {}


class Wrong(AssertionError):
    """Report state that a restore changed, or that does not work any more."""


class Holding:
    """Hold one piece of state. `rng` is the only source of choices, so a seed always builds the same."""

    name = ""

    def __init_subclass__(cls, **options: Any) -> None:
        if cls.__name__[0] != "_":
            cls.name = _snake(cls.__name__)
            KINDS[cls.name] = cls

    def __init__(self, seed: int, place: str) -> None:
        self.rng = random.Random(seed)
        self.place = place  # a path that no other holding uses; files of this holding begin with it
        self.owner = os.getpid()

    def path(self, name: str) -> str:
        return f"{self.place}.{name}"

    def data(self, size: int) -> bytes:
        return self.rng.randbytes(size)

    def build(self) -> None:
        """Make the state. Called in the owner."""

    def inherited(self) -> None:
        """Note the fork. Called in each child of the owner, for `early` holdings."""

    def report(self) -> Any:
        """Return what can be seen of the state, without changing it, as JSON."""
        return None

    def use(self) -> None:
        """Do new work with the state after the restore, in the owner."""

    def check(self) -> None:
        """Raise Wrong unless the work was done, in every process that has the state, after all have done `use`."""


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def same(got: Any, wanted: Any, what: str = "") -> None:
    if got != wanted:
        raise Wrong(f"{what}: {got!r:.200} instead of {wanted!r:.200}")


def digest(data: bytes) -> str:
    return f"{len(data)}:{hashlib.blake2b(data, digest_size=8).hexdigest()}"


def call(name: str, *args: Any) -> int:
    """Call a function of libc; raise OSError with its errno when it returns -1."""
    return _checked(getattr(LIBC, name)(*args), name)


def syscall(number: int, *args: Any) -> int:
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return _checked(LIBC.syscall(ctypes.c_long(number), *wide), f"system call {number}")


def _checked(result: int, what: str) -> int:
    if result in (-1, None, 2**64 - 1):  # the last: MAP_FAILED
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {errno.errorcode.get(number)} {os.strerror(number)}")
    return int(result)


def make(path: str, data: bytes) -> str:
    with open(path, "wb") as file:
        file.write(data)
    return path


def read_all(fd: int) -> bytes:
    """Read a regular file from its start, without moving its offset."""
    found = b""
    while part := os.pread(fd, 1 << 20, len(found)):
        found += part
    return found


def in_child(function: Any) -> int:
    """Run `function` in a short-lived child; return its result, 0 to 100. 101: it raised."""
    pid = os.fork()
    if pid == 0:
        try:
            result = int(function() or 0)
        except BaseException as error:  # the child must not return into the parent's stack
            print(repr(error), file=sys.stderr)
            result = 101
        os._exit(result)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
