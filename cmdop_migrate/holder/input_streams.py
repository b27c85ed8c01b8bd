"""Count numbered input: how much of each client's stream the session has got, so that input sent twice is applied once.

A client that may lose its connection numbers its input, and sends again what was
not acknowledged. The counts travel with a checkpoint, like the input itself.
"""

from __future__ import annotations

import re

LIMIT = 256  # streams remembered; the least recently used is forgotten first
BIRTHS = 64  # incarnations remembered
_ID = re.compile(r"[0-9a-f]{16}")
Saved = dict[str, object]


class Streams:
    """Hold, by stream id, how many bytes were applied, and the answer to the last of them: its journal number, and
    where the output was then."""

    def __init__(self) -> None:
        self._known: dict[str, list[int]] = {}
        self._born: list[list[int]] = []  # [token, where its output begins], of restored incarnations

    def open(self, stream: str) -> int:
        """Return how many bytes of the stream the session has got. Raise ValueError if that is no id."""
        if not _ID.fullmatch(stream):
            raise ValueError(f"not the id of a stream: {stream[:40]!r}")
        self._known[stream] = self._known.pop(stream, [0, 0, 0])
        while len(self._known) > LIMIT:
            del self._known[next(iter(self._known))]
        return self._known[stream][0]

    def new(self, stream: str, at: int, data: bytes) -> bytes | None:
        """Return the part of `data`, the bytes from number `at` on, that the session has not got yet; None if there is
        a gap."""
        applied = self.open(stream)
        return None if at > applied else data[applied - at :]

    def apply(self, stream: str, count: int, seq: int = 0, at: int = 0) -> int:
        """Note that the next `count` bytes were applied, and return how many there are now."""
        self._known[stream] = [self.open(stream) + count, seq, at]
        return self._known[stream][0]

    def last(self, stream: str) -> tuple[int, int]:
        """Return the journal number and the place in the output that `apply` was given last."""
        _, seq, at = self._known[stream]
        return seq, at

    def begin(self, token: int, output: int) -> None:
        """Note that an incarnation begins; its output starts at this number."""
        self._born = [*self._born, [token, output]][-BIRTHS:]

    def since(self, token: int) -> int | None:
        """Return the number from which on the output differs from what a client may have seen that was last attached to
        the incarnation `token`. None: it does not differ."""
        return min((output for born, output in self._born if born > token), default=None)

    def save(self) -> Saved:
        """Return the counts, for a checkpoint."""
        known = {stream: [*numbers] for stream, numbers in self._known.items()}
        return {"applied": known, "born": [[*birth] for birth in self._born]}

    def load(self, saved: object) -> None:
        """Take over what `save` returned. Raise ValueError on anything else: it may come from an image."""
        known, born = (saved.get("applied"), saved.get("born")) if isinstance(saved, dict) else (None, None)
        if not isinstance(known, dict) or not isinstance(born, list) or len(known) > LIMIT or len(born) > BIRTHS:
            raise ValueError("not a table of streams")
        numbered = [(stream, numbers, 3) for stream, numbers in known.items()]
        for stream, numbers, count in [*numbered, *(("0" * 16, birth, 2) for birth in born)]:
            right = (
                isinstance(numbers, list) and len(numbers) == count and all(type(number) is int for number in numbers)
            )
            if not _ID.fullmatch(stream) or not right or min(numbers) < 0:
                raise ValueError("not a table of streams")
        self._known = {stream: [*numbers] for stream, numbers in known.items()}
        self._born = [[*birth] for birth in born]
