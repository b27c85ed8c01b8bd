"""Numbered input: how much of each client's stream the session has got, so that what is sent twice goes in once.

A client that may lose its connection numbers what it types, and sends again
what it does not know to have arrived. Carried through checkpoints with what was
typed. Stdlib only: the holder loads this.
"""

from __future__ import annotations

import re

LIMIT = 256  # streams remembered; the one unused for longest goes first
BIRTHS = 64  # incarnations remembered
_ID = re.compile(r"[0-9a-f]{16}")
Saved = dict[str, object]


class Streams:
    """id -> how many bytes were applied; and what was answered to the last of them: its number, and where the output
    stood."""

    def __init__(self) -> None:
        self._known: dict[str, list[int]] = {}
        self._born: list[list[int]] = []  # [token, where its output begins], of incarnations made from a checkpoint

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

    def begin(self, token: int, output: int) -> None:
        """Another incarnation begins; its output from this number on."""
        self._born = [*self._born, [token, output]][-BIRTHS:]

    def since(self, token: int) -> int | None:
        """The number from which on the output is not what a client may have seen that was last with incarnation
        `token`. None: it is all the same."""
        return min((output for born, output in self._born if born > token), default=None)

    def save(self) -> Saved:
        known = {stream: [*numbers] for stream, numbers in self._known.items()}
        return {"applied": known, "born": [[*one] for one in self._born]}

    def load(self, saved: object) -> None:
        """What `save` gave. ValueError on anything else: it may come out of an image."""
        known, born = (saved.get("applied"), saved.get("born")) if isinstance(saved, dict) else (None, None)
        if not isinstance(known, dict) or not isinstance(born, list) or len(known) > LIMIT or len(born) > BIRTHS:
            raise ValueError("not a table of streams")
        numbered = [(stream, numbers, 3) for stream, numbers in known.items()]
        for stream, numbers, count in [*numbered, *(("0" * 16, one, 2) for one in born)]:
            right = isinstance(numbers, list) and len(numbers) == count and all(type(one) is int for one in numbers)
            if not _ID.fullmatch(stream) or not right or min(numbers) < 0:
                raise ValueError("not a table of streams")
        self._known = {stream: [*numbers] for stream, numbers in known.items()}
        self._born = [[*one] for one in born]
