"""Pagers, pickers and monitors: what is on the screen, and what the next key does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.programs.driver import drive
from tests.programs.scenario import Scenario, each
from tests.programs.terminal import Terminal
from tests.support.host import Host

LINES = "".join(f"line-{number:05d}\n" for number in range(1, 2001))


class Less(Scenario):
    argv = ("less", "text")
    files = {"text": LINES}
    sample = True

    def state(self, terminal: Terminal) -> None:
        terminal.shows("line-00001")
        terminal.type("/line-00500\r")
        terminal.shows(r"\Aline-00500")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.type("j")
        terminal.shows(rf"\Aline-{500 + number:05d}")


class GitLog(Scenario):
    name = "git log"
    argv = ("git", "log")
    sample = True
    env = {"PAGER": "less", "GIT_PAGER": "less", "LESS": "R"}

    def prepare(self, directory: Path) -> None:
        stream = ["reset refs/heads/main\n"]
        for number in range(1, 301):
            message = f"change-{number:03d}\n"
            stream.append(f"commit refs/heads/main\ncommitter A <a@b> {1_700_000_000 + number} +0000\n")
            stream.append(f"data {len(message)}\n{message}\n")
        subprocess.run(["git", "init", "-q", "-b", "main", directory], check=True)
        subprocess.run(["git", "-C", directory, "fast-import", "--quiet"], input="".join(stream).encode(), check=True)

    def state(self, terminal: Terminal) -> None:
        terminal.shows("change-300")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.type(f"/change-{250 - number}\r")
        terminal.shows(rf"\A\s+change-{250 - number}")


class Man(Scenario):
    argv = ("man", "bash")
    env = {"PAGER": "less", "MANPAGER": "less"}

    def state(self, terminal: Terminal) -> None:
        terminal.shows("NAME|BASH")

    def work(self, terminal: Terminal, number: int) -> None:
        before = terminal.screen().splitlines()[0]
        terminal.type("j")
        terminal.hides(rf"\A{re.escape(before)}$")
        assert "Manual page" in terminal.shows("Manual page bash")


class Fzf(Scenario):
    argv = ("bash", "-c", "fzf < text > picked; echo picked=$(cat picked); exec sleep 1000")
    version = "fzf --version"
    needs = ("fzf",)
    files = {"text": LINES}

    def state(self, terminal: Terminal) -> None:
        terminal.shows("2000/2000")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.type(f"{1230 + number}")
        terminal.shows(f"> line-0{1230 + number}")
        terminal.shows(" 1/2000")
        terminal.type("\x15")  # clear the query
        terminal.shows("2000/2000")

    def finish(self, terminal: Terminal) -> None:
        terminal.type("01777")
        terminal.shows("> line-01777")
        terminal.type("\r")
        terminal.see("picked=line-01777")


class Htop(Scenario):
    argv = ("htop",)

    def state(self, terminal: Terminal) -> None:
        terminal.shows("Load average|Tasks")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.type("h")
        terminal.shows("Process state")
        terminal.type("x")  # any key
        terminal.shows("Load average")


@each("Pagers and tools", Less, GitLog, Man, Fzf, Htop)
def test_pagers(scenario: Scenario, host: Host, tmp_path: Path) -> None:
    drive(scenario, host, tmp_path)
