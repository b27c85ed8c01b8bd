"""Queue the input of a session: one order of attributed bytes, journalled as they reach the terminal.

Bytes are staged with their author until an actor commits them by Enter (or an
interrupt); the journal line then names the actor that committed, and every
author. Where there is a gate, the committing byte waits for its answer, and
everything behind it too: the order is kept.
"""

from __future__ import annotations

import os
import termios
import time
from collections import deque
from collections.abc import Callable

from cmdop_migrate.holder.input_journal import Journal

COMMIT = b"\r\n\x03\x04\x1a\x1c"  # Enter, ^C, ^D, ^Z, ^\
LINE_LIMIT = 4096
QUEUE_LIMIT = 256 << 10
STEP = 4096
STEPS = 4  # per call: an admin that seizes the turn must not wait for a long paste
ALLOWED = "allowed"
_LINES = b"\r\n"
_CTRL_C, _CTRL_D, _CTRL_O, _CTRL_U = 3, 4, 15, 21
_RAW_KILL = b"\x15\x05\x15"  # the first one for a pending quote or prefix key; then from the end of the line


class Modes:
    """Read how the terminal takes input now."""

    def __init__(self, master: int) -> None:
        try:
            attributes = termios.tcgetattr(master)
        except termios.error:
            self.canonical, self.signals, self.secret, self.kill = False, False, True, _RAW_KILL
            return
        local = attributes[3]
        self.canonical, self.signals = bool(local & termios.ICANON), bool(local & termios.ISIG)
        # A terminal in line mode that does not echo asks for a password: its bytes are not journalled.
        self.secret = self.canonical and not local & termios.ECHO
        self.kill = attributes[6][termios.VKILL] * 2 if self.canonical else _RAW_KILL  # twice: ^V may quote one


def at(byte: int, staged: int, modes: Modes, gated: bool) -> tuple[bool, bool]:
    """Return whether the gate is asked before this byte, and whether it ends the line, given the bytes staged before
    it. Pure. A gate must see a whole line: with one, only bytes that surely end a line in the program do so here."""
    full = staged + 1 >= LINE_LIMIT
    if not gated:
        return False, full or byte in COMMIT
    if byte in _LINES or full:
        return True, True
    if byte == _CTRL_D and staged:
        return modes.canonical, False  # gives half a line to the program, or deletes a character
    if byte == _CTRL_O:
        return True, False  # readline executes the line on it
    return False, byte == _CTRL_D or (byte == _CTRL_C and modes.signals)


class Piece:
    """Hold one actor's bytes on their way to the terminal. `settle`, if given, is called once with the result: "" when
    all are written, else an error code and the reason; `data` then holds the bytes that were not written."""

    def __init__(self, actor: str | None, data: bytes, secret: bool, settle: Settle | None = None) -> None:
        self.actor = actor  # None: it was journalled before a checkpoint
        self.data, self.secret, self.settle = bytearray(data), secret, settle
        self.seq = 0  # journal number of the last line these bytes committed

    def done(self, error: str = "", why: str = "") -> None:
        """Report the result, once."""
        if self.settle is not None:
            settle, self.settle = self.settle, None
            settle(self, error, why)


Settle = Callable[[Piece, str, str], None]


class Inputs:
    """Order, stage and journal input, and write it to the terminal without ever blocking on it."""

    def __init__(self, journal: Journal, token: int) -> None:
        self.journal = journal
        self.token = token
        self.ask: Callable[[dict[str, object]], None] | None = None  # set if there is a gate
        self.asked: Piece | None = None  # its next byte waits for the gate's answer
        self._passed = ""  # the gate allowed it; its words
        self._queue: deque[Piece] = deque()
        self.count = 0  # bytes in the queue
        self._staged = bytearray()
        self._authors: list[str] = []
        self._secret = False  # some of what is staged was typed at a password prompt

    @property
    def waiting(self) -> int:
        """Return how many bytes wait for room in the terminal, not counting those that wait for a gate."""
        return 0 if self.asked is not None else self.count

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def has_room(self, count: int) -> bool:
        """Return whether `count` more bytes fit."""
        return self.count + count <= QUEUE_LIMIT

    def add(self, actor: str, data: bytes, master: int, settle: Settle | None = None) -> int:
        """Queue one actor's bytes. Return the number under which they are, or will be, journalled."""
        piece = Piece(actor, data, Modes(master).secret, settle)
        self._push(piece)
        self.flush(master)
        return piece.seq or self.journal.next

    def _push(self, piece: Piece) -> None:
        if piece.data:
            self._queue.append(piece)
            self.count += len(piece.data)
        else:
            piece.done()

    def queued(self) -> list[list[object]]:
        """Return the bytes that wait for the terminal or a gate, for the next incarnation."""
        return [[piece.actor, piece.data.decode("latin-1"), piece.secret] for piece in self._queue]

    def queue(self, data: bytes, actor: str | None = None, secret: bool = False) -> None:
        """Queue input that waited when a checkpoint was made. Without an actor it was journalled then."""
        self._push(Piece(actor, data, secret))

    def staged(self) -> dict[str, object]:
        """Return what is typed but not committed, and its authors, for the next incarnation. Of a secret, only the
        length."""
        data = b"\0" * len(self._staged) if self._secret else bytes(self._staged)
        return {"data": data.decode("latin-1"), "authors": list(self._authors), "secret": self._secret}

    def stage(self, staged: object) -> None:
        """Take over what was `staged` in a checkpoint: the terminal has it, the journal does not yet."""
        assert isinstance(staged, dict)
        authors = staged["authors"]
        assert isinstance(authors, list)
        self._staged[:] = str(staged["data"]).encode("latin-1")
        self._authors[:] = [str(author) for author in authors]
        self._secret = bool(staged["secret"])

    def flush(self, master: int) -> None:
        """Write what the terminal has room for now, up to a limit; the rest waits, in order."""
        steps = STEPS
        while self._queue and self.asked is None and steps:
            steps -= 1
            piece = self._queue[0]
            modes = Modes(master)
            data = bytes(piece.data[:STEP])
            if self.ask is not None and piece.actor is not None:
                data = self._ungated(data, modes)
                if not data:
                    if not self._passed:
                        self._ask(piece, modes)
                        return
                    data = bytes(piece.data[:1])
            try:
                written = os.write(master, data)
            except BlockingIOError:
                return
            except OSError:
                self.drop(lambda _: True, "gone")  # it can never be read: the slave side is closed
                return
            self._wrote(piece, data[:written], modes)

    def decide(self, allowed: bool, why: str, master: int) -> None:
        """Take the gate's answer about what is `asked`. If it is refused, erase the line and drop what the same actor
        has typed after it: that was meant to follow the line."""
        piece, self.asked = self.asked, None
        assert piece is not None and piece.actor is not None
        if allowed:
            self._passed = why or ALLOWED
        else:
            before, modes = self.staged(), Modes(master)
            self._stage(piece, piece.data[:1], modes)
            self._commit(piece.actor, "refused", why)
            self.drop(lambda other: other.actor == piece.actor, "gate", why)
            if modes.kill.strip(b"\0"):
                self._queue.appendleft(Piece(None, modes.kill, False))
                self.count += len(modes.kill)
            else:
                self.stage(before)  # this terminal cannot erase: the next Enter brings all of it before the gate again
        self.flush(master)

    def cancel(self) -> None:
        """Withdraw the question to the gate, because the session is captured: it is asked again later."""
        self.asked, self._passed = None, ""

    def drop(self, which: Callable[[Piece], bool], error: str, why: str = "") -> int:
        """Drop queued input and return how many bytes. Bytes that the terminal has stay there, staged with their
        authors."""
        gone = [piece for piece in self._queue if which(piece)]
        if gone and gone[0] is self._queue[0]:
            self.cancel()  # the answer was, or will be, about a dropped piece
        self._queue = deque(piece for piece in self._queue if piece not in gone)
        dropped = sum(len(piece.data) for piece in gone)
        self.count -= dropped
        for piece in gone:
            piece.done(error, why)
        return dropped

    def _ungated(self, data: bytes, modes: Modes) -> bytes:
        """Return the beginning of `data` about which no gate need be asked."""
        staged = len(self._staged)
        for index, byte in enumerate(data):
            asks, ends = at(byte, staged, modes, gated=True)
            if asks:
                return data[:index]
            staged = 0 if ends else staged + 1
        return data

    def _ask(self, piece: Piece, modes: Modes) -> None:
        assert self.ask is not None and piece.actor is not None
        self.asked = piece
        byte = piece.data[0]
        line = bytes(self._staged) + bytes([byte])
        secret = self._secret or piece.secret or modes.secret
        text = line.decode("utf-8", "replace")
        self.ask(
            {
                "actor": piece.actor,
                "originators": [*self._authors, *([piece.actor] if piece.actor not in self._authors else [])],
                "text": None if secret else text,
                "secret": secret,
                "plain": not secret and text.rstrip("\r\n").isprintable(),
                "partial": byte not in _LINES,
                "bytes": len(line),
                "seq": self.journal.next,
                "token": self.token,
            }
        )

    def _wrote(self, piece: Piece, data: bytes, modes: Modes) -> None:
        """Note that the terminal has these bytes of the piece."""
        del piece.data[: len(data)]
        self.count -= len(data)
        if piece.actor is not None:
            begin = 0
            for index, byte in enumerate(data):
                if at(byte, len(self._staged) + index - begin, modes, self.ask is not None)[1]:
                    self._stage(piece, data[begin : index + 1], modes)
                    begin = index + 1
                    piece.seq = self._commit(piece.actor, ALLOWED if self._passed else "", self._passed)
            self._stage(piece, data[begin:], modes)
            self._passed = ""
        if not piece.data:
            self._queue.popleft()
            piece.done()

    def _stage(self, piece: Piece, data: bytes | bytearray, modes: Modes) -> None:
        assert piece.actor is not None
        if not data:
            return
        self._secret = self._secret or piece.secret or modes.secret
        if piece.actor not in self._authors:
            self._authors.append(piece.actor)
        self._staged += data

    def _commit(self, actor: str, gate: str = "", why: str = "") -> int:
        line: dict[str, object] = {
            "time": round(time.time(), 3),
            "actor": actor,
            "originators": list(self._authors),
            "token": self.token,
            "bytes": len(self._staged),
            "text": None if self._secret else self._staged.decode("utf-8", "replace"),
            **({"gate": gate} if gate else {}),
            **({"why": why} if why not in ("", ALLOWED) else {}),
        }
        self._staged.clear()
        self._authors.clear()
        self._secret = False
        return self.journal.write(line)
