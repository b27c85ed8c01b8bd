"""To hear at once when something in a directory is made, replaced or removed. Python 3.11 has no function for it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_ONLYDIR = 0x01000000
_MASK = _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ONLYDIR
_BUFFER = 64 << 10


class Watch:
    """A descriptor that turns readable when a watched directory has changed. What changed is for the reader to find
    out: the kernel may have had too much to say."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")

    def fileno(self) -> int:
        return self._fd

    def add(self, directory: Path) -> bool:
        """Also of one that is watched already. False when there is no such directory, or no watch left: then it must be
        looked at now and then."""
        return bool(self._libc.inotify_add_watch(self._fd, os.fsencode(directory), _MASK) >= 0)

    def drain(self) -> None:
        try:
            while os.read(self._fd, _BUFFER):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self._fd)
