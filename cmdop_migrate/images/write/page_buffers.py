"""Receive memory pages into buffers: the kernel writes them there once, and they are never copied again.

A page server calls `open`, then for each run `run` and as many `window`s as it takes; the view it got must be full when
it calls the next method. Buffers end where a 64 KiB window ends: the few pages of an unfinished window move to the next
buffer, so the cut never depends on message or buffer sizes. Long runs are laid out one block of addresses per buffer
(fingerprints.py).
"""

from __future__ import annotations

import queue
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.layout import PAGE, WINDOW
from cmdop_migrate.images.format.windows import Extent, window_count
from cmdop_migrate.images.write.fingerprints import BLOCK
from cmdop_migrate.images.write.freeze_spill import SpillFile
from cmdop_migrate.util import bulk_io

BUFFER = 1 << 20
BUFFERS = 56
Release = Callable[[bytearray], None]


class MemorySink(Protocol):
    """Take full buffers of memory, and release each when its content is stored: the pipeline."""

    def submit_extents(self, buffer: bytearray, extents: Sequence[Extent], release: Release) -> None:
        """Store the extents of a buffer, then release it."""

    def submit_known(
        self,
        buffer: bytearray,
        extents: Sequence[Extent],
        release: Release,
        otherwise: Callable[[bytearray, Sequence[Extent]], bool],
    ) -> None:
        """Store a buffer whose blocks are all unchanged; offer any other to `otherwise`."""

    def check(self) -> None:
        """Raise the error after which nothing more can be stored, if any."""


class PageBuffers:
    """Collect the pages of one dump into buffers and submit full ones. Feed it from one thread at a time."""

    def __init__(
        self,
        sink: MemorySink,
        buffers: int = BUFFERS,
        size: int = BUFFER,
        spill_dir: Path | None = None,
        recognise: bool = False,
    ) -> None:
        """Prepare `buffers` buffers of `size` bytes, made on demand. With `spill_dir`, input that does not fit in
        memory is spilled there until `start_deferred`; with `recognise`, except unchanged buffers."""
        if size <= WINDOW:
            raise ValueError("a buffer must be larger than a window")
        self.extents: dict[str, list[Extent]] = {}
        self._sink = sink
        self._size = size
        # Full buffers rest here while there are free ones: the session is frozen until all its pages are here, and
        # the process that dumps it needs the cores more than our workers do.
        self._resting: deque[tuple[bytearray, list[Extent]]] = deque()
        self._rest_most = max(0, buffers * 3 // 4 - 1)
        self._free: queue.LifoQueue[bytearray] = queue.LifoQueue()  # the last one released is still in the CPU cache
        self._spill = SpillFile(spill_dir, sink.submit_extents, self._free.put) if spill_dir is not None else None
        self._recognise = recognise
        self._unmade = buffers
        self._deferred: SpillFile | None = None
        self._buffer: bytearray | None = None
        self._used = 0
        self._open: list[list[int]] = []  # [vaddr, size, offset] of runs in the buffer, parallel to _keys
        self._keys: list[tuple[str, int]] = []  # (dst, flags)
        self._handed = 0
        self._vaddr = 0
        self._dst = ""
        self._flags = 0

    def open(self, dst: str) -> None:
        """Start the target `dst`: the pages that follow belong to it."""
        self._settle()
        self._dst = layout.checked_blob_name(dst)  # checked now, not after the dump
        self.extents.setdefault(dst, [])

    def run(self, vaddr: int, nr_pages: int, flags: int, present: bool) -> None:
        """Start a run of pages; without `present` it has no bytes."""
        self._settle()
        self._flags = flags
        if not present and nr_pages:
            extent = Extent(self._dst, vaddr, nr_pages * PAGE, flags, False, 0, array("I"))
            self.extents[self._dst].append(extent)

    def keep(self, vaddr: int, flags: int, ref: int) -> None:
        """Record that the whole window at `vaddr` is the chunk `ref`, which the image already has."""
        self._settle()
        self.extents[self._dst].append(Extent(self._dst, vaddr, WINDOW, flags, True, 0, array("I", [ref])))

    def window(self, vaddr: int, size: int) -> memoryview:
        """Return a buffer for the bytes at `vaddr`, at most `size` long. Wait until one is free."""
        self._settle()
        if self._buffer is None or self._used == self._size or (vaddr % BLOCK == 0 and self._continues(vaddr)):
            self._next_buffer()
        assert self._buffer is not None
        self._vaddr = vaddr
        self._handed = min(size, self._size - self._used, BLOCK - vaddr % BLOCK)
        return memoryview(self._buffer)[self._used : self._used + self._handed]

    def done(self) -> None:
        """End the input: all pages are in our buffers."""
        self._settle()
        self._send()
        if self._spill is None:
            self._submit_resting(0)

    def start_deferred(self) -> None:
        """Start the deferred work, because the session has resumed. Call it only after `done`."""
        spill, self._spill = self._spill, None
        self._submit_resting(0)
        if spill is not None:
            self._deferred = spill
            spill.start_deferred(self._get)

    def finish(self) -> None:
        """Wait, after `start_deferred`, until everything is submitted."""
        if self._deferred is not None:
            self._deferred.finish()

    def stop(self) -> None:
        """Stop the spill files. No page is fed or read afterwards."""
        for spill in (self._spill, self._deferred):
            if spill is not None:
                spill.stop()

    def _settle(self) -> None:
        """Account for the bytes of the view that was handed out last."""
        size, self._handed = self._handed, 0
        if not size:
            return
        if self._continues(self._vaddr):
            self._open[-1][1] += size
        else:
            self._open.append([self._vaddr, size, self._used])
            self._keys.append((self._dst, self._flags))
        self._used += size

    def _continues(self, vaddr: int) -> bool:
        """Tell whether the last run in the buffer ends at `vaddr`, so that these bytes extend it."""
        return bool(self._open) and self._keys[-1] == (self._dst, self._flags) and sum(self._open[-1][:2]) == vaddr

    def _next_buffer(self) -> None:
        """Send the buffer and start another with the unfinished window of this one."""
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
        self._submit_resting(self._rest_most)

    def _submit_resting(self, most: int) -> None:
        """Submit or spill the oldest resting buffers until at most `most` rest."""
        while len(self._resting) > most:
            buffer, batch = self._resting.popleft()
            if self._spill is None:
                self._sink.submit_extents(buffer, batch, self._free.put)
            elif self._recognise:
                self._sink.submit_known(buffer, batch, self._free.put, self._spill.put)
            else:
                self._spill.put(buffer, batch)

    def _get(self) -> bytearray:
        if self._unmade:
            try:
                return self._free.get_nowait()
            except queue.Empty:
                self._unmade -= 1
                return bulk_io.buffer(self._size)
        if self._free.empty():
            self._submit_resting(self._rest_most // 2)
        while True:
            self._sink.check()
            if self._spill is not None:
                self._spill.check()
            try:
                return self._free.get(timeout=0.5)
            except queue.Empty:
                continue
