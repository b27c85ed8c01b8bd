"""Memory on its way in: pages go from the kernel into our buffers once, and are never copied again.

A page server calls `open`, then for each run `run` and as many `window`s as it
takes; the view it got must be full when it calls the next method. Buffers end
where a 64 KiB window ends: the few pages of an unfinished one move on to the
next buffer, so the cut never depends on message or buffer sizes. Long runs are
laid out a megabyte of addresses to a buffer (groups.py).
"""

from __future__ import annotations

import queue
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.layout import PAGE, WINDOW
from cmdop_migrate.images.format.windows import Extent, window_count
from cmdop_migrate.images.write.fingerprints import GROUP
from cmdop_migrate.images.write.freeze_spill import Aside
from cmdop_migrate.util import bulk_io

BUFFER = 1 << 20
BUFFERS = 56
Release = Callable[[bytearray], None]
Recognise = Callable[[bytearray, Sequence[Extent], Release, Callable[[bytearray, Sequence[Extent]], bool]], None]


class PageFeed:
    """One thread feeds at a time."""

    def __init__(
        self,
        submit: Callable[[bytearray, Sequence[Extent], Release], None],
        check: Callable[[], None],
        buffers: int = BUFFERS,
        size: int = BUFFER,
        aside: Path | None = None,
        recognise: Recognise | None = None,
    ) -> None:
        """`submit` takes a full buffer and gives it back later; `check` raises when nothing more can be stored. With
        `aside`, what does not fit in memory waits in a file there for `go_on`, but for what `recognise` knows."""
        if size <= WINDOW:
            raise ValueError("a buffer must be larger than a window")
        self.extents: dict[str, list[Extent]] = {}
        self._submit = submit
        self._check = check
        self._size = size
        # Full ones rest here as long as there are others: whoever gives us pages stands still until all are here, and
        # needs the cores more than we do.
        self._resting: deque[tuple[bytearray, list[Extent]]] = deque()
        self._rest = max(0, buffers * 3 // 4 - 1)
        self._free: queue.LifoQueue[bytearray] = queue.LifoQueue()  # the last one back is still in the cache
        self._aside = Aside(aside, submit, self._free.put) if aside is not None else None
        self._recognise = recognise
        self._unmade = buffers
        self._put_off: Aside | None = None
        self._buffer: bytearray | None = None
        self._used = 0
        self._open: list[list[int]] = []  # [vaddr, size, offset] of what lies in the buffer, with the key below
        self._keys: list[tuple[str, int]] = []  # (dst, flags)
        self._handed = 0
        self._vaddr = 0
        self._dst = ""
        self._flags = 0

    def open(self, dst: str) -> None:
        """What follows belongs to `dst`."""
        self._settle()
        self._dst = layout.checked_blob_name(dst)  # now, not when the dump is over
        self.extents.setdefault(dst, [])

    def run(self, vaddr: int, nr_pages: int, flags: int, present: bool) -> None:
        """A run begins; without `present` it has no bytes."""
        self._settle()
        self._flags = flags
        if not present and nr_pages:
            extent = Extent(self._dst, vaddr, nr_pages * PAGE, flags, False, 0, array("I"))
            self.extents[self._dst].append(extent)

    def keep(self, vaddr: int, flags: int, ref: int) -> None:
        """The whole window at `vaddr` is a chunk that the image has already."""
        self._settle()
        self.extents[self._dst].append(Extent(self._dst, vaddr, WINDOW, flags, True, 0, array("I", [ref])))

    def window(self, vaddr: int, size: int) -> memoryview:
        """A buffer for the bytes at `vaddr`, at most `size` long. Waits until one is free."""
        self._settle()
        if self._buffer is None or self._used == self._size or (vaddr % GROUP == 0 and self._goes_on(vaddr)):
            self._roll()
        assert self._buffer is not None
        self._vaddr = vaddr
        self._handed = min(size, self._size - self._used, GROUP - vaddr % GROUP)
        return memoryview(self._buffer)[self._used : self._used + self._handed]

    def done(self) -> None:
        """Everything is there: ours now."""
        self._settle()
        self._send()
        if self._aside is None:
            self._wake(0)

    def go_on(self) -> None:
        """Whoever gave us pages waits no more: the work that was put off begins. Only after `done`."""
        aside, self._aside = self._aside, None
        self._wake(0)
        if aside is not None:
            self._put_off = aside
            aside.go_on(self._get)

    def finish(self) -> None:
        """After `go_on`: until everything is submitted."""
        if self._put_off is not None:
            self._put_off.finish()

    def stop(self) -> None:
        """Nothing is fed or read any more."""
        for one in (self._aside, self._put_off):
            if one is not None:
                one.stop()

    def _settle(self) -> None:
        """Enter the bytes of the view that was handed out last."""
        size, self._handed = self._handed, 0
        if not size:
            return
        if self._goes_on(self._vaddr):
            self._open[-1][1] += size
        else:
            self._open.append([self._vaddr, size, self._used])
            self._keys.append((self._dst, self._flags))
        self._used += size

    def _goes_on(self, vaddr: int) -> bool:
        """Whether what lies in the buffer last ends there."""
        return bool(self._open) and self._keys[-1] == (self._dst, self._flags) and sum(self._open[-1][:2]) == vaddr

    def _roll(self) -> None:
        """Send the buffer and begin another with the unfinished window of this one."""
        fresh = self._get()
        carried: tuple[tuple[str, int], int, int] | None = None
        if self._open and self._buffer is not None:
            last = self._open[-1]
            tail = min((last[0] + last[1]) % WINDOW, last[1])
            if tail:
                last[1] -= tail
                carried = self._keys[-1], last[0] + last[1], tail
                fresh[:tail] = memoryview(self._buffer)[self._used - tail : self._used]
        self._send()
        self._buffer = fresh
        if carried is not None:
            self._keys, self._open, self._used = [carried[0]], [[carried[1], carried[2], 0]], carried[2]

    def _send(self) -> None:
        buffer, self._buffer = self._buffer, None
        rows, keys, self._open, self._keys, self._used = self._open, self._keys, [], [], 0
        if buffer is None:
            return
        batch = []
        for (vaddr, size, offset), (dst, flags) in zip(rows, keys, strict=True):
            if size:
                refs = array("I", bytes(4 * window_count(vaddr, size)))
                batch.append(Extent(dst, vaddr, size, flags, True, offset, refs))
                self.extents[dst].append(batch[-1])
        self._resting.append((buffer, batch))
        self._wake(self._rest)

    def _wake(self, most: int) -> None:
        """Until at most so many rest, the oldest first."""
        while len(self._resting) > most:
            buffer, batch = self._resting.popleft()
            if self._aside is None:
                self._submit(buffer, batch, self._free.put)
            elif self._recognise is not None:
                self._recognise(buffer, batch, self._free.put, self._aside.put)
            else:
                self._aside.put(buffer, batch)

    def _get(self) -> bytearray:
        if self._unmade:
            try:
                return self._free.get_nowait()
            except queue.Empty:
                self._unmade -= 1
                return bulk_io.buffer(self._size)
        if self._free.empty():
            self._wake(self._rest // 2)
        while True:
            self._check()
            if self._aside is not None:
                self._aside.check()
            try:
                return self._free.get(timeout=0.5)
            except queue.Empty:
                continue
