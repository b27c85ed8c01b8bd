"""Prepare a session's raw output for a user's terminal: replay without side effects, and a clean way out.

Pure: bytes in, bytes out.
"""

from __future__ import annotations

import re
from bisect import bisect_left

from cmdop_migrate.holder.output_ring import AT_START, TRACKED, Modes

PREFIX = 0x1C  # Ctrl-\
_ALTERNATE = {47, 1047, 1049}

# Questions to the terminal. The session asked them once, long ago; if a replay asked again, the terminal's answers
# would be typed into the session.
_QUESTIONS = re.compile(
    rb"\x1b\[[?>=]?[0-9;]*c"  # device attributes
    rb"|\x1b\[\??[0-9;]*n"  # status and cursor reports
    rb"|\x1b\[(?:1[1-9]|2[01])(?:;[0-9]+)*t"  # window reports
    rb"|\x1b\[\??[0-9;]*\$p"  # mode requests
    rb"|\x1b\[>[0-9;]*q|\x1b\[\?u|\x1b\[[0-9;]*x"  # version, keyboard and parameter requests
    rb"|\x1b\][0-9;]*(?:[^\x07\x1b]*;)?\?(?:\x07|\x1b\\)"  # colours, clipboard
    rb"|\x1bP[+$]q[^\x1b]*\x1b\\"  # capabilities, settings
    rb"|\x1bZ|\x05"
)
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-9;?>=$]*|\][^\x07\x1b]{0,512}\x1b?|P[^\x1b]{0,512}\x1b?)?\Z")


class Replay:
    """Make old output safe to show again."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the output without questions to the terminal. An unfinished sequence at the end is withheld."""
        data = self._held + data
        cut = _UNFINISHED.search(data)
        self._held = data[cut.start() :] if cut else b""
        return _QUESTIONS.sub(b"", data[: cut.start()] if cut else data)

    def end(self) -> bytes:
        """Return what was withheld: the live output continues from there."""
        held, self._held = self._held, b""
        return held


def set_modes(on: list[int]) -> bytes:
    """Return the sequences that bring a new terminal into the modes that were on where the replay begins."""
    codes = [b"\x1b[?%dh" % mode for mode in on if mode in TRACKED - AT_START]
    codes += [b"\x1b[?%dl" % mode for mode in AT_START if mode not in on]
    return b"".join(codes)


def reset(modes: Modes) -> bytes:
    """Return the sequences that undo the modes in which the session left the terminal."""
    on = set(modes.on())
    codes = [b"\x1b[?%dl" % mode for mode in sorted(on & (TRACKED - AT_START))]
    codes += [b"\x1b[?%dh" % mode for mode in sorted(AT_START - on)]
    return b"".join(codes) + b"\x1b>\x1b[0m"


def notice(text: str, full_screen: bool, rows: int, cols: int) -> bytes:
    """Return a status line that can be removed again: below the cursor, where a shell has nothing, or in the last row
    of a full-screen program, which then repaints itself. The cursor and its colours stay as they are."""
    shown = b"\x1b[0;7m %s \x1b[0m" % text[: max(0, cols - 3)].encode()
    if full_screen:
        return b"\x1b7\x1b[%d;1H\x1b[2K%s\x1b8" % (rows, shown)
    return b"\n\x1b[A\x1b7\x1b[B\r\x1b[2K%s\x1b8" % shown  # the line feed makes room in the last row


def no_notice(full_screen: bool, rows: int) -> bytes:
    """Return the sequences that remove a notice."""
    where = b"\x1b[%d;1H" % rows if full_screen else b"\x1b[B\r"
    return b"\x1b7%s\x1b[2K\x1b8" % where


def is_full_screen(modes: Modes) -> bool:
    """Return whether the alternate screen is on."""
    return bool(_ALTERNATE & set(modes.on()))


_NOT_TEXT = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[PX^_][^\x1b]*\x1b\\|\x1b[ -/]*[0-~]|\r\n?"
)


class Plain:
    """Hold what a person would read: no colours or cursor moves, and a newline for every kind of line end."""

    def __init__(self, data: bytes) -> None:
        text, marks, position = bytearray(), [(0, 0)], 0
        for found in _NOT_TEXT.finditer(data):
            text += data[position : found.start()]
            if found[0].startswith(b"\r"):
                text += b"\n"
            position = found.end()
            marks.append((len(text), position))
        self.text = bytes(text + data[position:])
        self._marks = marks

    def raw_end(self, end: int) -> int:
        """Return where in the raw data the first `end` bytes of the text end."""
        at = bisect_left(self._marks, (end, 0)) - 1
        start, raw = self._marks[max(at, 0)]
        return raw + end - start


class Keys:
    """Take the detach key out of what is typed: Ctrl-\\ d detaches, Ctrl-\\ Ctrl-\\ is one Ctrl-\\."""

    def __init__(self) -> None:
        self._pending = False

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """Return the input for the session, and whether to detach now."""
        out = bytearray()
        for byte in data:
            if not self._pending and byte == PREFIX:
                self._pending = True
            elif self._pending:
                self._pending = False
                if byte in b"dD":
                    return bytes(out), True
                if byte != PREFIX:
                    out.append(PREFIX)
                out.append(byte)
            else:
                out.append(byte)
        return bytes(out), False
