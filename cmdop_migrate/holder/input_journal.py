"""Write the input journal of a session: one JSON line per input, in order, each bound to the one before it.

A line carries `prev`, the digest of the line before, so that no line can be
changed, removed or inserted without breaking the chain. The file moves with the
session, and so does the digest of its last line.
"""

from __future__ import annotations

import json
import os
from _blake2 import blake2b  # hashlib would bring all of OpenSSL into every holder: 0.6 MiB

ROTATE_AT = 8 << 20  # the file before it is kept
OLD = ".1"
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def digest(line: bytes) -> str:
    """Return the digest of one line, without its newline."""
    return blake2b(line, digest_size=16).hexdigest()


class Journal:
    """Append JSON lines to a file in the session's directory. Numbering continues where the file, or the one before it,
    ends."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, _FLAGS, 0o600)
        self._cut = b""  # written before the next line, so that it is a line of its own
        tail = _tail(self._fd)
        if tail and not tail.endswith(b"\n"):
            self._cut = b"\n"  # a line cut by a crash is ended before the next one
        last = _last(tail) or self._last_of_old()
        self.next = (int(json.loads(last)["seq"]) if last else 0) + 1
        self.head = digest(last) if last else ""

    def _last_of_old(self) -> bytes:
        try:
            fd = os.open(self.path + OLD, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            return _last(_tail(fd))
        finally:
            os.close(fd)

    def write(self, line: dict[str, object]) -> int:
        """Append a line and return its number. On a full disk the line is lost; the missing number and the broken chain
        show that. A session must not end, nor its user be locked out, because its journal cannot be written."""
        seq, self.next = self.next, self.next + 1
        text = json.dumps({"seq": seq, **line, "prev": self.head}, separators=(",", ":")).encode()
        self.head = digest(text)
        data = self._cut + text + b"\n"
        try:
            written = os.write(self._fd, data)
        except OSError:
            return seq
        self._cut = b"" if written == len(data) else b"\n"
        if os.fstat(self._fd).st_size > ROTATE_AT:
            self._rotate()
        return seq

    def _rotate(self) -> None:
        """Begin a new file and keep this one as the old one. If that fails, continue with this one."""
        try:
            fd = os.open(self.path + ".new", _FLAGS | os.O_TRUNC, 0o600)
        except OSError:
            return
        try:
            os.replace(self.path, self.path + OLD)
            os.replace(self.path + ".new", self.path)
        except OSError:
            os.close(fd)
            return
        os.close(self._fd)
        self._fd, self._cut = fd, b""


def _tail(fd: int) -> bytes:
    """Return the end of the file, with at least one whole line in it if the file has any."""
    size, step = os.fstat(fd).st_size, 64 << 10
    while True:
        tail = os.pread(fd, step, max(0, size - step))
        if step >= size or _last(tail):
            return tail
        step *= 4


def _last(tail: bytes) -> bytes:
    """Return the last whole line; empty if no line is whole."""
    for line in reversed(tail.split(b"\n")):
        try:
            if int(json.loads(line)["seq"]) >= 0:
                return line
        except (ValueError, KeyError, TypeError):
            continue
    return b""
