"""Editors, with unsaved text and undo history."""

from __future__ import annotations

from pathlib import Path

from tests.programs.driver import drive
from tests.programs.scenario import WORK, Scenario, each
from tests.programs.terminal import Terminal
from tests.support.host import Host


class Vim(Scenario):
    argv = ("vim", "-u", "NONE", "-n", "story.txt")
    sample = True

    def state(self, terminal: Terminal) -> None:
        terminal.shows("story.txt")
        terminal.type("ifirst line\x1b")
        terminal.shows("first line")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.type(f"oround {number}\x1b")
        terminal.shows(f"^round {number}$")
        terminal.type("u")  # the undo history is in memory only
        terminal.hides(f"^round {number}$")
        terminal.type(f"oround {number}\x1b:w! saved.{number}\r")
        assert terminal.read(f"{WORK}/saved.{number}").splitlines() == [
            "first line",
            *(f"round {n}" for n in range(1, number + 1)),
        ]


class Nvim(Vim):
    argv = ("nvim", "-u", "NONE", "-n", "story.txt")
    sample = False


class Emacs(Scenario):
    argv = ("emacs", "-nw", "-Q", "story.txt")

    def state(self, terminal: Terminal) -> None:
        terminal.shows("story.txt")
        terminal.type("first line\r")
        terminal.shows("^first line")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.type(f"round {number}\r")
        terminal.shows(f"^round {number}$")
        terminal.type(f'\x1b:(write-region nil nil "{WORK}/saved.{number}")\r')
        assert terminal.read(f"{WORK}/saved.{number}").splitlines() == [
            "first line",
            *(f"round {n}" for n in range(1, number + 1)),
        ]


class Nano(Scenario):
    argv = ("nano", "--ignorercfiles", "story.txt")
    expected = "3 of 8: nano compares inode numbers, which a restore changes, and asks before it writes"
    files = {"story.txt": "on disk\n"}

    def state(self, terminal: Terminal) -> None:
        terminal.shows("story.txt")
        terminal.type("first line\r")
        terminal.shows("^first line")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.type(f"round {number}\r")
        terminal.shows(f"^round {number}$")
        terminal.type("\x0f")  # write out
        terminal.shows("Name to Write")
        terminal.type("\r")
        terminal.shows(r"Wrote \d+ lines")
        assert f"round {number}\n" in terminal.read(f"{WORK}/story.txt")


class Mc(Scenario):
    """Midnight Commander with its subshell."""

    argv = ("mc", "--nocolor")
    files = {"alpha.txt": "a\n", "beta.txt": "b\n"}

    def state(self, terminal: Terminal) -> None:
        terminal.shows("alpha.txt")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.type(f"touch made.{number}\r")
        terminal.shows(f"made.{number}")


@each("Editors", Vim, Nvim, Emacs, Nano, Mc)
def test_editors(scenario: Scenario, host: Host, tmp_path: Path) -> None:
    drive(scenario, host, tmp_path)
