"""Numbered input: how much of each client's stream the session has got, so that what is sent twice goes in once.

A client that may lose its connection numbers what it types, and sends again
what it does not know to have arrived. Carried through checkpoints with what was
typed. Stdlib only: the holder loads this.
"""

from __future__ import annotations

import re

LIMIT = 256  # streams remembered; the one unused for longest goes first
_ID = re.compile(r"[0-9a-f]{16}")
Saved = dict[str, list[int]]


class Streams:
    """id -> how many bytes were applied; and what was answered to the last of them: its number, and where the output
    stood."""

    def __init__(self) -> None:
        self._known: Saved = {}

    def open(self, stream: str) -> int:
        """How many bytes of it the session has got. ValueError: no id."""
        if not _ID.fullmatch(stream):
            raise ValueError(f"not the id of a stream: {stream[:40]!r}")
        self._known[stream] = self._known.pop(stream, [0, 0, 0])
        while len(self._known) > LIMIT:
            del self._known[next(iter(self._known))]
        return self._known[stream][0]

    def new(self, stream: str, at: int, data: bytes) -> bytes | None:
        """What of `data`, the bytes from number `at` on, the session has not got yet; None when there is a gap."""
        applied = self.open(stream)
        return None if at > applied else data[applied - at :]

    def apply(self, stream: str, count: int, seq: int = 0, at: int = 0) -> int:
        """The next `count` bytes are in -> how many there are now."""
        self._known[stream] = [self.open(stream) + count, seq, at]
        return self._known[stream][0]

    def last(self, stream: str) -> tuple[int, int]:
        """What `apply` was told last."""
        _, seq, at = self._known[stream]
        return seq, at

    def save(self) -> Saved:
        return {stream: [*numbers] for stream, numbers in self._known.items()}

    def load(self, saved: object) -> None:
        """What `save` gave. ValueError on anything else: it may come out of an image."""
        if not isinstance(saved, dict) or len(saved) > LIMIT:
            raise ValueError("not a table of streams")
        for stream, numbers in saved.items():
            right = isinstance(numbers, list) and len(numbers) == 3 and all(type(one) is int for one in numbers)
            if not _ID.fullmatch(stream) or not right or min(numbers) < 0:
                raise ValueError("not a table of streams")
        self._known = {stream: [*numbers] for stream, numbers in saved.items()}
