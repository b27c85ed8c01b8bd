"""Watch directories for files that are created, replaced or removed. Python 3.11 has no function for inotify(7)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_ONLYDIR = 0x01000000
_MASK = _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ONLYDIR
_BUFFER = 64 << 10


class Watch:
    """Provide a descriptor that becomes readable when a watched directory has changed. The caller has to find out what
    changed: the kernel drops events when there are too many."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")

    def fileno(self) -> int:
        return self._fd

    def add(self, directory: Path) -> bool:
        """Watch a directory; it may be watched already. Return False if it does not exist or no watch is left: the
        caller must then poll it."""
        return bool(self._libc.inotify_add_watch(self._fd, os.fsencode(directory), _MASK) >= 0)

    def drain(self) -> None:
        """Discard the pending events, so that the descriptor is not readable until the next change."""
        try:
            while os.read(self._fd, _BUFFER):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self._fd)
