"""Which of a process's pages are still to come, and where the image has them.

Stretches of its addresses, in order, each with a shift: what belongs at `at`
the image has at `at - shift`. They start out where they were dumped; a process
that runs may move, drop and inherit them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Piece = tuple[int, int, int]  # start, end, shift


class Missing:
    """Not for several threads at once."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self._starts: list[int] = []
        self._rest: list[tuple[int, int]] = []  # (end, shift)
        for start, end, shift in pieces:
            if end <= start or (self._rest and start < self._rest[-1][0]):
                raise ValueError(f"stretch out of order at {start:#x}")
            self._starts.append(start)
            self._rest.append((end, shift))

    def __bool__(self) -> bool:
        return bool(self._starts)

    def copy(self) -> Missing:
        return Missing(self.pieces())

    def pieces(self) -> list[Piece]:
        return [(start, end, shift) for start, (end, shift) in zip(self._starts, self._rest, strict=True)]

    def clear(self) -> None:
        self._starts, self._rest = [], []

    def first(self, start: int, end: int) -> Piece | None:
        """The first stretch with a page in start..end, cut to it."""
        at = self._at(start)
        if at == len(self._starts) or self._starts[at] >= end:
            return None
        until, shift = self._rest[at]
        return max(start, self._starts[at]), min(end, until), shift

    def cut(self, start: int, end: int) -> list[Piece]:
        """Take what lies in start..end out; -> it."""
        at = begin = self._at(start)
        gone: list[Piece] = []
        left: list[Piece] = []
        while at < len(self._starts) and self._starts[at] < end:
            low, (high, shift) = self._starts[at], self._rest[at]
            if low < start:
                left.append((low, start, shift))
            if high > end:
                left.append((end, high, shift))
            gone.append((max(low, start), min(high, end), shift))
            at += 1
        self._starts[begin:at] = [one[0] for one in left]
        self._rest[begin:at] = [one[1:] for one in left]
        return gone

    def move(self, start: int, to: int, size: int) -> None:
        """What was to come to start..start+size comes to `to` instead, and nothing else comes there."""
        moved = self.cut(start, start + size)
        self.cut(to, to + size)
        at = self._at(to)
        self._starts[at:at] = [low - start + to for low, _, _ in moved]
        self._rest[at:at] = [(high - start + to, shift - start + to) for _, high, shift in moved]

    def _at(self, address: int) -> int:
        """The number of the first stretch that ends after `address`."""
        at = bisect_right(self._starts, address)
        return at - 1 if at and self._rest[at - 1][0] > address else at
