"""Keep the last bytes that a session printed, under absolute sequence numbers.

Byte N of the output keeps the number N permanently, across clients, restarts and
hosts.
"""

from __future__ import annotations

import re
import struct

_SAVED = struct.Struct(">8sQQ")
_MAGIC = b"cmdring1"
_CHANGE = re.compile(rb"\x1b\[\?([0-9;]{1,40})([hl])|\x1bc")
# Modes that change what a terminal shows or sends. Others are ignored, so that no session can make this grow.
TRACKED = frozenset({1, 5, 6, 7, 25, 47, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 1047, 1049, 2004})
AT_START = frozenset({7, 25})  # a terminal starts with wrapping on and the cursor shown
_CARRY = 48  # bytes of the longest mode sequence that an eviction may cut


class Modes:
    """Track which DEC private modes (alternate screen, mouse, bracketed paste …) were on at the ring's start.

    Without them a client that attaches after the bytes that switched them on were
    evicted would replay a full-screen program onto the wrong screen.
    """

    def __init__(self, on: frozenset[int] = AT_START) -> None:
        self._on = set(on & TRACKED)
        self._carry = b""

    def feed(self, evicted: bytes) -> None:
        """Note the mode changes in evicted output."""
        data = self._carry + evicted
        for numbers, action in _CHANGE.findall(data):
            if not action:
                self._on = set(AT_START)  # a reset of the whole terminal
            for number in numbers.split(b";"):
                if number and int(number) in TRACKED:
                    (self._on.add if action == b"h" else self._on.discard)(int(number))
        escape = data.rfind(b"\x1b", max(0, len(data) - _CARRY))
        self._carry = data[escape:] if escape >= 0 else b""

    def on(self) -> list[int]:
        """Return the numbers of the modes that are on."""
        return sorted(self._on)


class Ring:
    """Hold [start, end) of the output, at most `size` bytes of it."""

    def __init__(self, size: int, start: int = 0, data: bytes = b"", modes: Modes | None = None) -> None:
        self.size = size
        self.start = start
        self.modes = modes or Modes()
        self._data = bytearray(data)
        self._head = 0  # bytes of _data already evicted: compacted only from time to time

    @property
    def end(self) -> int:
        return self.start + len(self._data) - self._head

    def append(self, data: bytes) -> None:
        """Add output, and evict the oldest bytes if there are more than `size`."""
        self._data += data
        over = self.end - self.start - self.size
        if over > 0:
            self.modes.feed(bytes(self._data[self._head : self._head + over]))
            self._head += over
            self.start += over
            if self._head >= max(self.size // 4, 65536):
                del self._data[: self._head]
                self._head = 0

    def read(self, seq: int, limit: int) -> bytes:
        """Return at most `limit` bytes from `seq`, which must lie within [start, end]."""
        offset = self._head + seq - self.start
        return bytes(self._data[offset : offset + limit])

    def save(self) -> bytes:
        """Return the ring as bytes."""
        body = bytes(self._data[self._head :])
        modes = ",".join(map(str, self.modes.on())).encode()
        return _SAVED.pack(_MAGIC, self.start, len(modes)) + modes + body

    @classmethod
    def load(cls, saved: bytes, size: int) -> Ring:
        """Return the ring that `save` has written. Raise ValueError on anything else."""
        if len(saved) < _SAVED.size:
            raise ValueError("saved output is too short")
        magic, start, length = _SAVED.unpack_from(saved)
        body = _SAVED.size + length
        if magic != _MAGIC or length > 4096 or len(saved) < body:
            raise ValueError("not saved output")
        modes = frozenset(int(number) for number in saved[_SAVED.size : body].split(b",") if number)
        ring = cls(size, start, b"", Modes(modes))
        ring.append(saved[body:])
        return ring
