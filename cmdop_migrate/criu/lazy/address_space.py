"""The memory of one restored process: what of it is missing, and how that is put in its place (pager.py)."""

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

BLOCK = 1 << 20  # decoded at a time, where nobody waits
AT_ONCE = 256 << 10  # placed at a time: whoever waits for a page may have to wait for that
PAUSE = 0.0002
_END = 1 << 64
# An address that the kernel does not know, and of which no event tells: where a process inherited it, it was not meant
# to (MADV_DONTFORK); where it did not, memory is lost.
_DOUBT = 2.0


class Memory(Protocol):
    """One process's pages in the image, by the addresses it had when it was dumped."""

    def later(self) -> Iterable[tuple[int, int]]:
        """start, end of what is not laid out, in order."""

    def window(self, vaddr: int) -> tuple[int, int]:
        """start, end of what is stored together with `vaddr`."""

    def read(self, start: int) -> bytes | None:
        """The window that starts there; None: zeros. Raises when it cannot give the true bytes: nothing else may stand
        in for them."""

    def stretch(self, vaddr: int, most: int) -> tuple[int, int]:
        """start, end of windows from that of `vaddr` on, all zeros or none, `most` bytes in all or one."""

    def fill(self, start: int, out: memoryview) -> bool:
        """What `stretch` gave, into `out`; False: zeros. Raises like `read`."""


@dataclass(frozen=True)
class Claim:
    """A window of the image, and where it belongs."""

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
    """One process."""

    def __init__(self, fd: int, memory: Memory, missing: Missing, inherited: bool = False) -> None:
        self.fd, self.memory, self.missing = fd, memory, missing
        self.inherited = inherited
        self.lock = threading.Lock()
        self._cursor = 0
        self._doubts: dict[int, float] = {}

    def claim(self) -> Claim | None:
        """What to bring next; None: once around, and where something is missing still, others are at it."""
        with self.lock:
            piece = self.missing.first(self._cursor, _END)
            if piece is None:
                self._cursor = 0
                return None
            start, end, shift = piece
            return self._claim(shift, *self.memory.stretch(start - shift, min(BLOCK, end - start)))

    def wanted(self, address: int) -> Claim | None:
        """What a thread waits for; None: nothing is to come there. What follows is likely to be wanted next."""
        with self.lock:
            piece = self.missing.first(address, address + PAGE)
            return None if piece is None else self._claim(piece[2], *self.memory.window(address - piece[2]))

    def _claim(self, shift: int, start: int, end: int) -> Claim:
        self._cursor = end + shift
        return Claim(start + shift, end + shift, shift)

    def lacks(self, address: int) -> bool:
        with self.lock:
            return self.missing.first(address, address + PAGE) is not None

    def put(self, claim: Claim, base: int) -> None:
        """Place what of it is missing still, from `base` in our memory (0: zeros). What has moved meanwhile stays
        missing."""
        at, most = claim.start, AT_ONCE
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
                if error == errno.EEXIST:  # as good: it can have come from nobody but us
                    done = PAGE
                    userfaultfd.wake(self.fd, at, PAGE)
                if done:
                    self.missing.cut(at, at + done)
                    at += done
                if error in (errno.ESRCH, errno.ENOSPC):  # the process has ended, or begun another program
                    self.missing.clear()
                    return
                if error == errno.ENOENT and size == PAGE:
                    self._doubt(at)
                    at += PAGE
            if error == errno.ENOENT:
                most = PAGE  # two mappings meet in it
            elif error == errno.EAGAIN and not done:
                time.sleep(PAUSE)  # its mappings change: the event must be read first
            elif error not in (0, errno.EEXIST, errno.EAGAIN):
                raise OSError(error, f"{os.strerror(error)}: no memory could be placed at {at:#x}")

    def _doubt(self, at: int) -> None:
        since = self._doubts.setdefault(at, time.monotonic())
        if time.monotonic() - since < _DOUBT:
            return
        if not self.inherited:
            raise Unexpected(f"there is no place for the memory at {at:#x}", "The session's checkpoint is whole.")
        self.missing.cut(at, at + PAGE)

    def zero(self, address: int) -> bool:
        """A page that is in no image. False: not now, or something is to come there after all."""
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
        """The process has ended. What others still have to do for it, they need not."""
        with self.lock:
            self.missing.clear()
            os.close(self.fd)
            self.fd = -1

    def apply(self, event: userfaultfd.Remap | userfaultfd.Drop) -> None:
        """With the lock held. Whoever waits for a page there looks again."""
        if isinstance(event, userfaultfd.Remap):
            self.missing.move(event.start, event.to, event.size)
            userfaultfd.wake(self.fd, event.start, event.size)
        else:
            self.missing.cut(event.start, event.end)
            userfaultfd.wake(self.fd, event.start, event.end - event.start)
