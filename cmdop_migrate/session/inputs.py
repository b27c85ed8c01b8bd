"""What goes into a session: one order of attributed inputs, journalled as they are committed.

Bytes are staged with their author until someone commits them by Enter (or an
interrupt); the journal line then names who committed and everyone whose bytes
are in it. Stdlib only: the holder loads this.
"""

from __future__ import annotations

import json
import os
import termios
import time

COMMIT = b"\r\n\x03\x04\x1a\x1c"  # Enter, ^C, ^D, ^Z, ^\
LINE_LIMIT = 4096
QUEUE_LIMIT = 256 << 10
ROTATE_AT = 8 << 20  # the file before it is kept
OLD = ".1"
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class Journal:
    """Append-only JSON lines in the session's directory. Numbers go on where the file ends, or the one before it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, _FLAGS, 0o600)
        self._cut = b""  # what must come first, so that the next line stands alone
        tail = _tail(self._fd)
        if tail and not tail.endswith(b"\n"):
            self._cut = b"\n"  # a line cut by a crash is ended before the next one
        self.next = (_highest(tail) or self._last_of_old()) + 1

    def _last_of_old(self) -> int:
        try:
            fd = os.open(self.path + OLD, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            return _highest(_tail(fd))
        finally:
            os.close(fd)

    def write(self, line: dict[str, object]) -> int:
        """Its number. On a full disk the line is lost and the number with it, a gap that tells: a session must not
        end, nor its user be locked out, because its record cannot be kept."""
        seq, self.next = self.next, self.next + 1
        data = self._cut + json.dumps({"seq": seq, **line}, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._fd, data)
        except OSError:
            return seq
        self._cut = b"" if written == len(data) else b"\n"
        if os.fstat(self._fd).st_size > ROTATE_AT:
            self._rotate()
        return seq

    def _rotate(self) -> None:
        """A new file, and this one in place of the one before it. If that cannot be, we go on with this one."""
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
    return os.pread(fd, 64 << 10, max(0, os.fstat(fd).st_size - (64 << 10)))


def _highest(tail: bytes) -> int:
    """The number of the last whole line; 0 when there is none."""
    for line in reversed(tail.splitlines()):
        try:
            return int(json.loads(line)["seq"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


class Inputs:
    """Orders, stages, journals and feeds the terminal without ever blocking on it."""

    def __init__(self, journal: Journal, token: int) -> None:
        self.journal = journal
        self.token = token
        self._queue = bytearray()
        self._staged = bytearray()
        self._authors: list[str] = []
        self._secret = False  # some of what is staged was typed where a password was asked for

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def has_room(self, count: int) -> bool:
        return len(self._queue) + count <= QUEUE_LIMIT

    def add(self, actor: str, data: bytes, master: int) -> int:
        """Takes one actor's bytes; returns the number under which they are, or will be, journalled."""
        secret = _is_secret(master)
        self._secret = self._secret or secret
        seq = self.journal.next
        for byte in data:
            if actor not in self._authors:
                self._authors.append(actor)
            self._staged.append(byte)
            if byte in COMMIT or len(self._staged) >= LINE_LIMIT:
                seq = self._commit(actor)
                self._secret = secret
        if not self._staged:
            self._secret = False
        self._queue += data
        self.flush(master)
        return seq

    def unwritten(self) -> bytes:
        """What was journalled but the terminal had no room for yet."""
        return bytes(self._queue)

    def queue(self, data: bytes) -> None:
        """Input that was journalled before a checkpoint: to be fed, not to be journalled again."""
        self._queue += data

    def staged(self) -> dict[str, object]:
        """What is typed but not committed, and by whom: for the incarnation after this one. Of a secret, how long."""
        data = b"\0" * len(self._staged) if self._secret else bytes(self._staged)
        return {"data": data.decode("latin-1"), "authors": list(self._authors), "secret": self._secret}

    def stage(self, staged: object) -> None:
        """What was `staged` before a checkpoint: the terminal has it, the journal does not yet."""
        assert isinstance(staged, dict)
        authors = staged["authors"]
        assert isinstance(authors, list)
        self._staged[:] = str(staged["data"]).encode("latin-1")
        self._authors[:] = [str(one) for one in authors]
        self._secret = bool(staged["secret"])

    def flush(self, master: int) -> None:
        """Writes what the terminal takes now; the rest waits, in order."""
        while self._queue:
            try:
                written = os.write(master, self._queue[:4096])
            except BlockingIOError:
                return
            except OSError:
                self._queue.clear()  # nobody will ever read it: the slave side is gone
                return
            del self._queue[:written]

    def _commit(self, actor: str) -> int:
        text = None if self._secret else self._staged.decode("utf-8", "replace")
        seq = self.journal.write(
            {
                "time": round(time.time(), 3),
                "actor": actor,
                "originators": list(self._authors),
                "token": self.token,
                "bytes": len(self._staged),
                "text": text,
            }
        )
        self._staged.clear()
        self._authors.clear()
        return seq


def _is_secret(master: int) -> bool:
    """A line mode terminal that does not echo is asking for a password: its bytes are not written down."""
    try:
        local = termios.tcgetattr(master)[3]
    except termios.error:
        return True
    return bool(local & termios.ICANON) and not local & termios.ECHO
