"""Take and hold advisory file locks (flock).

A lock belongs to the open file, not to the process: a forked or spawned process that inherits the descriptor keeps
the lock until the last copy of the descriptor is closed, and the kernel releases it when every owner has died. To
release a lock means to close its descriptor. Standard library only: the holder loads this module.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

StrPath = str | os.PathLike[str]
RETRY_EVERY = 0.005  # seconds between two attempts to take a lock that another process holds


def open_file(path: StrPath) -> int:
    """Open a lock file and create it, for its owner only, if it is missing. Return its descriptor, not yet locked."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def open_directory(path: StrPath) -> int:
    """Open a directory to lock it. Return its descriptor, not yet locked. Raise OSError if it is missing."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def try_lock(fd: int) -> bool:
    """Lock an open file exclusively. Return False, without waiting, if another process holds its lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(fd: int) -> None:
    """Lock an open file exclusively. Wait until it is free."""
    fcntl.flock(fd, fcntl.LOCK_EX)


def try_take(path: StrPath, timeout: float = 0.0) -> int | None:
    """Return the descriptor of a locked lock file, or None if another process still holds it after `timeout` seconds.

    The caller closes the descriptor to release the lock.
    """
    fd = open_file(path)
    until = time.monotonic() + timeout
    while not try_lock(fd):
        if time.monotonic() >= until:
            os.close(fd)
            return None
        time.sleep(RETRY_EVERY)
    return fd


def try_take_current(path: StrPath, timeout: float = 0.0) -> int | None:
    """Do the same as `try_take` for a lock file that its owner may remove: the descriptor that is returned is of the
    file that has this path now. Raise FileNotFoundError if the directory of the file is missing."""
    until = time.monotonic() + timeout
    while True:
        fd = try_take(path, max(0.0, until - time.monotonic()))
        if fd is None:
            return None
        try:
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)


@contextmanager
def held(path: StrPath, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock file for the duration of the block. Wait for it as long as it takes; call `on_wait` first if another
    process holds it."""
    fd = open_file(path)
    try:
        if not try_lock(fd):
            if on_wait is not None:
                on_wait()
            lock(fd)
        yield
    finally:
        os.close(fd)
