"""Serve memory by address out of sealed chunks, for page faults and for streams.

A fault opens one window. Reads that continue where the last one ended, and long ones, are decoded ahead in blocks of
windows by a thread pool.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future

from cmdop_migrate.images.format.codec import Buffer
from cmdop_migrate.images.format.layout import NO_CHUNK, PAGE, WINDOW
from cmdop_migrate.images.format.windows import PageTable, Segment

BLOCK = 16  # windows decoded by one task
AHEAD = 3  # blocks
KEPT = 10  # blocks: 10 MiB
RECENT = 32  # single windows: 2 MiB
LONG = 4  # windows in one read that are worth a block
_ZEROS = memoryview(bytes(WINDOW))


class PageReader:
    """Read the memory of one target. May be used from several threads."""

    def __init__(
        self,
        table: PageTable,
        chunk: Callable[[int], Buffer],
        chunk_into: Callable[[int, memoryview], None],
        pool: Executor,
    ) -> None:
        self.table = table
        self._chunk, self._chunk_into = chunk, chunk_into
        self._pool = pool
        self._blocks: OrderedDict[int, Future[list[memoryview]]] = OrderedDict()
        self._recent: OrderedDict[int, memoryview] = OrderedDict()
        self._next = -1
        self._lock = threading.Lock()

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.table.segments

    def read(self, vaddr: int, nr_pages: int) -> list[memoryview]:
        """Return the pages at `vaddr`: at most `nr_pages`, fewer where the segment ends, none where there is no memory.
        Raise ImageRefused rather than return a byte that was not sealed."""
        segment = self.table.find(vaddr)
        if segment is None or nr_pages <= 0 or vaddr % PAGE:
            return []
        end = min(segment.end, vaddr + nr_pages * PAGE)
        first, last = self.table.slot(segment, vaddr), self.table.slot(segment, end - 1)
        self._prepare(first, last)
        views = []
        for slot in range(first, last + 1):
            data = self._window(slot)
            start = max(vaddr - vaddr % WINDOW, segment.vaddr)
            stop = min(vaddr - vaddr % WINDOW + WINDOW, end)
            views.append(data[vaddr - start : stop - start])
            vaddr = stop
        return views

    def window(self, vaddr: int) -> tuple[int, int]:
        """Return (start, end) of the window that holds `vaddr`. Raise KeyError if there is no memory."""
        segment = self.table.find(vaddr)
        if segment is None:
            raise KeyError(f"no memory at {vaddr:#x}")
        start = vaddr - vaddr % WINDOW
        return max(start, segment.vaddr), min(start + WINDOW, segment.end)

    def chunk_at(self, vaddr: int) -> Buffer | None:
        """Return the whole window that holds `vaddr`, or None if it is all zeros."""
        segment = self.table.find(vaddr)
        if segment is None:
            raise KeyError(f"no memory at {vaddr:#x}")
        number = self.table.refs[self.table.slot(segment, vaddr)]
        return None if number == NO_CHUNK else self._chunk(number)

    def stretch(self, vaddr: int, most: int) -> tuple[int, int]:
        """Return (start, end) of consecutive windows from that of `vaddr` on, either all zeros or none: at most `most`
        bytes, at least one window."""
        start, end = self.window(vaddr)
        segment = self.table.find(vaddr)
        assert segment is not None
        slot = self.table.slot(segment, vaddr)
        is_zero = self.table.refs[slot] == NO_CHUNK
        while end < segment.end and end + WINDOW - start <= most:
            slot += 1
            if (self.table.refs[slot] == NO_CHUNK) is not is_zero:
                break
            end = min(end + WINDOW, segment.end)
        return start, end

    def fill(self, start: int, out: memoryview) -> bool:
        """Decode what `stretch` returned into `out`. Return False if it is zeros; `out` is unchanged then."""
        segment = self.table.find(start)
        if segment is None:
            raise KeyError(f"no memory at {start:#x}")
        slot, at = self.table.slot(segment, start), 0
        if self.table.refs[slot] == NO_CHUNK:
            return False
        while at < len(out):
            size = min(WINDOW - (start + at) % WINDOW, len(out) - at)
            self._chunk_into(self.table.refs[slot], out[at : at + size])
            slot, at = slot + 1, at + size
        return True

    def _prepare(self, first: int, last: int) -> None:
        """Start decoding what is needed and what is likely to be needed next."""
        with self._lock:
            streaming = first in (self._next, self._next - 1)
            self._next = last + 1
            if not streaming and last - first < LONG:
                return
            begin = first // BLOCK if last - first >= LONG else (last + 1) // BLOCK
            end = last // BLOCK + (AHEAD if streaming else 0)
            for block in range(begin, min(end, (len(self.table.refs) - 1) // BLOCK) + 1):
                if block not in self._blocks:
                    self._blocks[block] = self._pool.submit(self._decode, block)
            while len(self._blocks) > max(KEPT, end - begin + 1):
                self._blocks.popitem(last=False)

    def _window(self, slot: int) -> memoryview:
        number = self.table.refs[slot]
        if number == NO_CHUNK:
            return _ZEROS
        with self._lock:
            block = self._blocks.get(slot // BLOCK)
            recent = self._recent.get(number)
        if block is not None:
            return block.result()[slot % BLOCK]
        if recent is None:
            recent = memoryview(self._chunk(number))
            with self._lock:
                self._recent[number] = recent
                if len(self._recent) > RECENT:
                    self._recent.popitem(last=False)
        return recent

    def _decode(self, block: int) -> list[memoryview]:
        refs = self.table.refs[block * BLOCK : (block + 1) * BLOCK]
        return [_ZEROS if number == NO_CHUNK else memoryview(self._chunk(number)) for number in refs]
