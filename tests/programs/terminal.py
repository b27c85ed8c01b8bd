"""A session as its user sees it: type keys, read the screen.

Extends `tests.support.program_session.Program` with a terminal emulator, because a full-screen program paints words in pieces and in any
order: only the painted screen shows what a person would read.
"""

from __future__ import annotations

import copy
import os
import re
import time

import pyte

from cmdop_migrate import config
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host as LocalHost
from tests.support.host import Host, until
from tests.support.patience import bound
from tests.support.program_session import Program

WITHIN = float(os.environ.get("PROGRAMS_WITHIN", "60"))  # seconds; the machine may be shared
# pyte stops parsing at these: keyboard and colour protocols, device control and application strings.
UNKNOWN = re.compile(
    r"\x1b\[[<>=][0-9;:]*[a-zA-Z]|\x1b\[\?[0-9;]*[^0-9;hl$]|\x1b\[[0-9;?]*\$[a-z]|\x1b[P_^X].*?\x1b\\", re.S
)
UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:?<>=$]*|[P_^X][^\x1b]*\x1b?)?\Z")


class _Cells(pyte.Screen):
    def select_graphic_rendition(self, *attributes: int, private: bool = False) -> None:
        """Ignore the private form, which is a keyboard protocol's."""
        if not private:
            super().select_graphic_rendition(*attributes)


class Screen:
    """The terminal's cells after all output so far."""

    def __init__(self, rows: int, columns: int) -> None:
        self._cells = _Cells(columns, rows)
        self._stream = pyte.Stream(self._cells)
        self._held = ""

    def feed(self, data: str) -> None:
        data = self._held + data
        cut = UNFINISHED.search(data)
        self._held = data[cut.start() :] if cut else ""
        self._stream.feed(UNKNOWN.sub("", data[: cut.start()] if cut else data))

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._cells.display)

    def copy(self) -> Screen:
        other = Screen(self._cells.lines, self._cells.columns)
        other._cells = copy.deepcopy(self._cells)
        other._stream = pyte.Stream(other._cells)
        other._held = self._held
        return other


class Terminal(Program):
    """One session, running already, with its screen."""

    def __init__(self, host: Host, name: str, session: str, screen: Screen, seq: int = 0) -> None:
        self.host, self.name, self.session = host, name, session
        self.records = LocalHost(config.load(environ=host.env()))
        self.seq = seq
        self._screen, self._painted = screen, seq

    def screen(self) -> str:
        """What is on the screen now."""
        found = talk.output(self.records, self.session, self._painted)
        self._painted = found.end
        self._screen.feed(found.data.decode(errors="replace"))
        return self._screen.text()

    def shows(self, pattern: str, within: float = WITHIN) -> str:
        """Wait until the screen matches `pattern`."""
        end = time.monotonic() + bound(within)
        while not (found := re.search(pattern, self.screen(), re.MULTILINE)):
            assert time.monotonic() < end, f"the screen never showed {pattern!r} within {within:g} s:\n{self.screen()}"
            time.sleep(0.05)
        return found[0]

    def hides(self, pattern: str, within: float = WITHIN) -> None:
        """Wait until the screen does not match `pattern`."""
        until(lambda: not re.search(pattern, self.screen(), re.MULTILINE), within, f"{pattern!r} leaves the screen")

    def see(self, pattern: str, within: float = WITHIN) -> str:
        return super().see(pattern, within)

    def ask(self, line: str, pattern: str, within: float = WITHIN) -> str:
        """Type one line into a shell or REPL and wait for `pattern` in what it prints next. `pattern` must not match the
        line itself, which the terminal echoes."""
        assert not re.search(pattern, line), (line, pattern)
        self.mark()
        self.type(line + "\n")
        return self.see(pattern, within)

    def mark(self) -> None:
        """Ignore all output so far in the next `see`."""
        self.seq = talk.output(self.records, self.session, None).end

    def branch(self, name: str) -> Terminal:
        """Fork the session and return the branch; its screen begins as this one's."""
        self.screen()
        made = self.host.cm_json("fork", self.session, name, timeout=300)
        start = talk.output(self.records, made["session"], None)
        seq = min(max(self._painted, start.start), start.end)
        return Terminal(self.host, name, made["session"], self._screen.copy(), seq)
