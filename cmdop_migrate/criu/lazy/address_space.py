"""Track and fill the missing memory of one process that is being restored lazily (pager.py)."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from cmdop_migrate.criu.lazy import userfaultfd
from cmdop_migrate.criu.lazy.missing import Missing
from cmdop_migrate.criu.lazy.userfaultfd import PAGE
from cmdop_migrate.errors import Unexpected

BLOCK = 1 << 20  # bytes decoded at a time during prefetch
PLACED_AT_A_TIME = 256 << 10  # bytes; a thread that waits for a page may have to wait for that
RETRY_PAUSE = 0.0002
_END = 1 << 64
# Seconds for which an address may be unmapped without an event that says so. In a forked child that is the effect of
# MADV_DONTFORK; in a restored process memory is lost.
_UNMAPPED_FOR = 2.0


class Memory(Protocol):
    """Read the pages of one process in the image, by the addresses they had when it was dumped."""

    def later(self) -> Iterable[tuple[int, int]]:
        """Return (start, end) of the stretches to be filled lazily, in order."""

    def window(self, vaddr: int) -> tuple[int, int]:
        """Return (start, end) of the window that is stored together with `vaddr`."""

    def read(self, start: int) -> bytes | None:
        """Return the window that starts there, None for zeros. Raise when it cannot supply the true bytes: nothing else
        may be returned instead."""

    def stretch(self, vaddr: int, most: int) -> tuple[int, int]:
        """Return (start, end) of consecutive windows from that of `vaddr` on, either all zeros or none: one window, or
        several of `most` bytes together."""

    def fill(self, start: int, out: memoryview) -> bool:
        """Read a stretch returned by `stretch` into `out`; return False for zeros. Raise like `read`."""


@dataclass(frozen=True)
class Claim:
    """Describe a window of the image, and the addresses where it belongs."""

    start: int
    end: int
    shift: int

    @property
    def source(self) -> int:
        return self.start - self.shift

    @property
    def size(self) -> int:
        return self.end - self.start


class Space:
    """Manage the memory of one process. `inherited`: a child that was forked during the restore."""

    def __init__(self, fd: int, memory: Memory, missing: Missing, inherited: bool = False) -> None:
        self.fd, self.memory, self.missing = fd, memory, missing
        self.inherited = inherited
        self.lock = threading.Lock()
        self._cursor = 0
        self._unmapped_since: dict[int, float] = {}

    def claim(self) -> Claim | None:
        """Return the next window to prefetch, None when all were claimed once: other threads may still work on
        theirs."""
        with self.lock:
            piece = self.missing.first(self._cursor, _END)
            if piece is None:
                self._cursor = 0
                return None
            start, end, shift = piece
            return self._claim(shift, *self.memory.stretch(start - shift, min(BLOCK, end - start)))

    def claim_at(self, address: int) -> Claim | None:
        """Return the window that a thread waits for, None if nothing is missing there. Prefetch continues behind it:
        the process is likely to need that next."""
        with self.lock:
            piece = self.missing.first(address, address + PAGE)
            return None if piece is None else self._claim(piece[2], *self.memory.window(address - piece[2]))

    def _claim(self, shift: int, start: int, end: int) -> Claim:
        self._cursor = end + shift
        return Claim(start + shift, end + shift, shift)

    def lacks(self, address: int) -> bool:
        """Tell whether the page at `address` is still missing."""
        with self.lock:
            return self.missing.first(address, address + PAGE) is not None

    def put(self, claim: Claim, base: int) -> None:
        """Place the pages of the claim that are still missing, from `base` in our memory (0: zeros). Pages that the
        process has moved meanwhile stay missing. Raise OSError, or Unexpected if an address is not mapped."""
        at, most = claim.start, PLACED_AT_A_TIME
        while at < claim.end:
            with self.lock:
                piece = self.missing.first(at, claim.end)
                if piece is None:
                    return
                at, end, shift = piece
                if shift != claim.shift:
                    at = end
                    continue
                size = min(end - at, most)
                done, error = userfaultfd.put(self.fd, at, base and base + at - claim.start, size)
                if error == errno.EEXIST:  # as good: only this pager places pages
                    done = PAGE
                    userfaultfd.wake(self.fd, at, PAGE)
                if done:
                    self.missing.cut(at, at + done)
                    at += done
                if error in (errno.ESRCH, errno.ENOSPC):  # the process has ended, or has executed another program
                    self.missing.clear()
                    return
                if error == errno.ENOENT and size == PAGE:
                    self._on_unmapped(at)
                    at += PAGE
            if error == errno.ENOENT:
                most = PAGE  # two mappings meet in it
            elif error == errno.EAGAIN and not done:
                time.sleep(RETRY_PAUSE)  # its mappings are changing: the event must be read first
            elif error not in (0, errno.EEXIST, errno.EAGAIN):
                raise OSError(error, f"{os.strerror(error)}: cannot place memory at {at:#x}")

    def _on_unmapped(self, at: int) -> None:
        since = self._unmapped_since.setdefault(at, time.monotonic())
        if time.monotonic() - since < _UNMAPPED_FOR:
            return
        if not self.inherited:
            raise Unexpected(
                f"the process has no mapping for the memory at {at:#x}", "The session's checkpoint is intact."
            )
        self.missing.cut(at, at + PAGE)

    def zero(self, address: int) -> bool:
        """Place a page of zeros that is in no image. Return False if that is not possible now, or the page is in the
        image."""
        with self.lock:
            if self.missing.first(address, address + PAGE) is not None:
                return False
            if self.fd < 0:
                return True
            _, error = userfaultfd.put(self.fd, address, 0, PAGE)
            if error == errno.EAGAIN:
                return False
            if error in (errno.EEXIST, errno.ENOENT):
                userfaultfd.wake(self.fd, address, PAGE)
        return True

    def close(self) -> None:
        """Close the userfaultfd of a process that has ended; nothing is missing in it any more."""
        with self.lock:
            self.missing.clear()
            os.close(self.fd)
            self.fd = -1

    def apply(self, event: userfaultfd.Remap | userfaultfd.Drop) -> None:
        """Apply an event, with the lock held, and wake the threads that wait for a page there."""
        if isinstance(event, userfaultfd.Remap):
            self.missing.move(event.start, event.to, event.size)
            userfaultfd.wake(self.fd, event.start, event.size)
        else:
            self.missing.cut(event.start, event.end)
            userfaultfd.wake(self.fd, event.start, event.end - event.start)
