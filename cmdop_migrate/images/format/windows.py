"""Cut memory into windows on 64 KiB boundaries of the virtual address. Pure.

The cut depends only on which pages exist with which flags, not on the sizes of CRIU's messages or of our buffers. So a
region that did not change gives the same chunks in the next checkpoint.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from struct import Struct, error

from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.format.codec import HINT
from cmdop_migrate.images.format.layout import NO_CHUNK, PAGE, WINDOW

_HEAD = Struct("<II")
_SEGMENT = Struct("<QQHBx")
_ADDRESSES = 1 << 57  # limit of five-level page tables; shared memory is addressed by offset


@dataclass(frozen=True)
class Segment:
    """Describe consecutive pages with the same flags. Without `present` there are no bytes (holes, parent pages)."""

    vaddr: int
    pages: int
    flags: int
    present: bool

    @property
    def end(self) -> int:
        return self.vaddr + self.pages * PAGE


def windows(vaddr: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (offset from vaddr, size) of each chunk: whole windows, and shorter ones at the two ends."""
    offset = 0
    while offset < size:
        step = min(WINDOW - (vaddr + offset) % WINDOW, size - offset)
        yield offset, step
        offset += step


def window_count(vaddr: int, size: int) -> int:
    return (vaddr + size + WINDOW - 1) // WINDOW - vaddr // WINDOW if size else 0


def pages_refused(why: str) -> ImageRefused:
    return ImageRefused(f"a page table is damaged: {why}", HINT)


class PageTable:
    """Map the memory of one process or shared segment: segments in address order, and a chunk number per window."""

    def __init__(self, segments: Sequence[Segment], refs: array[int]) -> None:
        """Check everything it is given: it may come from an image. Raise ImageRefused if it is inconsistent."""
        counts, end = [0], 0
        for segment in segments:
            size = segment.pages * PAGE
            if segment.vaddr % PAGE or not segment.pages or segment.end > _ADDRESSES:
                raise pages_refused("a segment is outside of any address space")
            if segment.vaddr < end:
                raise pages_refused("segments overlap or are out of order")
            end = segment.end
            counts.append(window_count(segment.vaddr, size) if segment.present else 0)
        if sum(counts) != len(refs):
            raise pages_refused(f"{sum(counts)} windows but {len(refs)} chunks")
        self.segments = tuple(segments)
        self.refs = refs
        self._starts = [segment.vaddr for segment in segments]
        self._first = list(accumulate(counts))

    @property
    def size(self) -> int:
        """Return the bytes of memory with content, zero windows included."""
        return sum(segment.pages for segment in self.segments if segment.present) * PAGE

    def find(self, vaddr: int) -> Segment | None:
        """Return the segment with bytes for this address, or None."""
        at = bisect_right(self._starts, vaddr) - 1
        if at < 0 or vaddr >= self.segments[at].end or not self.segments[at].present:
            return None
        return self.segments[at]

    def slot(self, segment: Segment, vaddr: int) -> int:
        """Return the position in `refs` of the window that holds `vaddr`."""
        first = self._first[bisect_right(self._starts, segment.vaddr) - 1]
        return first + vaddr // WINDOW - segment.vaddr // WINDOW

    def sized_refs(self) -> Iterator[tuple[array[int], int]]:
        """Yield (chunk numbers, size that their windows require) of all windows, in order. The inner windows of a
        segment come together."""
        for segment, (at, end) in zip(self.segments, pairwise(self._first), strict=True):
            if end - at == 1:
                yield self.refs[at:end], segment.pages * PAGE
            elif end > at:
                yield self.refs[at : at + 1], WINDOW - segment.vaddr % WINDOW
                yield self.refs[at + 1 : end - 1], WINDOW
                yield self.refs[end - 1 : end], (segment.end - 1) % WINDOW + 1

    def encode(self) -> bytes:
        refs = array("I", self.refs)
        if sys.byteorder == "big":
            refs.byteswap()
        head = _HEAD.pack(len(self.segments), len(refs))
        return (
            head + b"".join(_SEGMENT.pack(s.vaddr, s.pages, s.flags, s.present) for s in self.segments) + refs.tobytes()
        )

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> PageTable:
        view = memoryview(data)
        try:
            segments, refs = _HEAD.unpack_from(view)
            start = _HEAD.size + segments * _SEGMENT.size
            if len(view) != start + 4 * refs:
                raise pages_refused("its length is wrong")
            rows = list(_SEGMENT.iter_unpack(view[_HEAD.size : start]))
        except error as problem:
            raise pages_refused(str(problem)) from problem
        if any(present > 1 for *_, present in rows):
            raise pages_refused("unknown kind of segment")
        numbers = array("I")
        numbers.frombytes(view[start:])
        if sys.byteorder == "big":
            numbers.byteswap()
        return cls([Segment(vaddr, pages, flags, bool(p)) for vaddr, pages, flags, p in rows], numbers)


@dataclass(frozen=True)
class Extent:
    """Describe bytes that are contiguous both in memory and in a buffer. `refs` is filled in when they are stored."""

    dst: str
    vaddr: int
    size: int
    flags: int
    present: bool
    offset: int
    refs: array[int]


def table_of(extents: Iterable[Extent]) -> PageTable:
    """Join the extents of one target into a table, in address order, independent of their order and cut."""
    segments: list[Segment] = []
    refs = array("I")
    for extent in sorted(extents, key=lambda e: e.vaddr):
        pages = extent.size // PAGE
        last = segments[-1] if segments else None
        if (
            last
            and last.end == extent.vaddr
            and (last.flags, last.present) == (extent.flags, extent.present)
            and (extent.vaddr % WINDOW == 0 or not extent.present)
        ):
            segments[-1] = Segment(last.vaddr, last.pages + pages, last.flags, last.present)
        else:
            segments.append(Segment(extent.vaddr, pages, extent.flags, extent.present))
        refs.extend(extent.refs)
    return PageTable(segments, refs)


__all__ = ["NO_CHUNK", "Extent", "PageTable", "Segment", "table_of", "window_count", "windows"]
