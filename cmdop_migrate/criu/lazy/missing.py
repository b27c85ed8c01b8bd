"""Track which pages of a process are still missing, and where they are in the image.

Missing pages are stretches of addresses, in order, each with a shift: the page for address `at` is in the image at
`at - shift`. At first each stretch is where it was dumped; a running process may move and drop stretches, and its
children inherit them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Piece = tuple[int, int, int]  # start, end, shift


class Missing:
    """Hold the missing stretches of one process. Not thread-safe."""

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
        """Return the same stretches, to be changed independently."""
        return Missing(self.pieces())

    def pieces(self) -> list[Piece]:
        """Return all stretches in order."""
        return [(start, end, shift) for start, (end, shift) in zip(self._starts, self._rest, strict=True)]

    def clear(self) -> None:
        """Forget all stretches."""
        self._starts, self._rest = [], []

    def first(self, start: int, end: int) -> Piece | None:
        """Return the first stretch with a page in start..end, limited to start..end."""
        at = self._at(start)
        if at == len(self._starts) or self._starts[at] >= end:
            return None
        until, shift = self._rest[at]
        return max(start, self._starts[at]), min(end, until), shift

    def cut(self, start: int, end: int) -> list[Piece]:
        """Remove everything in start..end, and return it."""
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
        self._starts[begin:at] = [piece[0] for piece in left]
        self._rest[begin:at] = [piece[1:] for piece in left]
        return gone

    def move(self, start: int, to: int, size: int) -> None:
        """Move the missing pages of start..start+size to `to`, where they replace all others."""
        moved = self.cut(start, start + size)
        self.cut(to, to + size)
        at = self._at(to)
        self._starts[at:at] = [low - start + to for low, _, _ in moved]
        self._rest[at:at] = [(high - start + to, shift - start + to) for _, high, shift in moved]

    def _at(self, address: int) -> int:
        """Return the index of the first stretch that ends after `address`."""
        at = bisect_right(self._starts, address)
        return at - 1 if at and self._rest[at - 1][0] > address else at
