"""Read what /proc tells about other processes, and copy their descriptors.

Standard library only and quick to import: the dump guard loads this module.
"""

from __future__ import annotations

import ctypes
import os

_PIDFD_GETFD = 438  # on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


def status(task: int) -> dict[str, str]:
    """Return the lines of /proc/TASK/status by their names; `task` is a process or a thread. Raise OSError when it has
    ended."""
    with open(f"/proc/{task}/status", encoding="utf-8", errors="replace") as lines:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def inner_pid(task: int) -> int:
    """Return the number that a process or thread has in its own pid namespace, which is the innermost one (NSpid).
    Raise OSError when it has ended."""
    with open(f"/proc/{task}/status", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return task


def copy_descriptor(pid: int, fd: int) -> int:
    """Return a descriptor of this process for what process `pid` has open as `fd`. Raise OSError."""
    process = os.pidfd_open(pid)
    try:
        return copy_from_pidfd(process, fd)
    finally:
        os.close(process)


def copy_from_pidfd(process: int, fd: int) -> int:
    """Return a copy of descriptor `fd` of the process that the pidfd `process` refers to. Raise OSError."""
    copy = int(_libc.syscall(_PIDFD_GETFD, process, fd, 0))
    if copy < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"descriptor {fd} of another process")
    return copy
