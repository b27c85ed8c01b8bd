"""What one program's test consists of: a subclass of `Scenario`, and `each` to make tests of several.

class Less(Scenario):
    argv = ("less", "/etc/services")

    def state(self, terminal):              # bring it into a state worth keeping
        terminal.type("/tcp\\n")

    def work(self, terminal, number):       # prove the state, and that it reacts; called after each stage
        terminal.type("n")

@each("Pagers", Less)
def test_pagers(scenario, host, tmp_path):
    drive(scenario, host, tmp_path)
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.programs.terminal import Terminal

CACHE = Path(os.environ.get("PROGRAMS_DIR", "/var/cache/cmdop-migrate/programs"))  # filled by scripts/setup-programs
MODULES = CACHE / "node_modules"
HOME = "/root/home"
WORK = "/root/work"
# No program of this suite may reach the outside, update itself or report usage.
QUIET = {
    "HOME": HOME,
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
    "DO_NOT_TRACK": "1",
    "CI": "",
}


class Scenario:
    """One program: how it is started, what state it has, and how it shows that the state is still there."""

    name: ClassVar[str] = ""  # in the table; by default the class's name
    family: ClassVar[str] = ""  # group of the report's rows, set by `each`
    argv: ClassVar[tuple[str, ...]] = ("bash", "--norc")
    version: ClassVar[str] = ""  # a shell command on the host that prints the version in its first line
    needs: ClassVar[tuple[str, ...]] = ()  # executables, besides the first word of argv
    env: ClassVar[Mapping[str, str]] = {}
    files: ClassVar[Mapping[str, str]] = {}  # relative to WORK, inside the session
    before: ClassVar[str] = ""  # shell commands inside the session before argv is executed
    rows, columns = 24, 80  # what a session without a client has
    sample: ClassVar[bool] = False  # runs in the default suite: needs only what scripts/setup --test installs
    expected: ClassVar[str] = ""  # why it fails today, for what a planned issue mends: xfail(strict)
    stopped: ClassVar[int] = 0  # processes that are stopped when all is well
    advice: ClassVar[str] = ""  # what a user should know or do

    def state(self, terminal: Terminal) -> None:
        """Bring the program into a state worth keeping."""

    def work(self, terminal: Terminal, number: int) -> None:
        """Prove that the state is there and that the program reacts. `number` is 1 after the
        restore, 2 after the second, 3 after `--leave-running`, and 4 both in the branch and in its parent."""
        raise NotImplementedError

    def finish(self, terminal: Terminal) -> None:
        """Prove that what was in progress comes to its right end."""

    def prepare(self, directory: Path) -> None:
        """Write more files into `directory`, which becomes WORK in the session."""

    @property
    def title(self) -> str:
        return self.name or type(self).__name__.lower()

    def command(self, directory: Path) -> tuple[str, ...]:
        """The session's command: WORK filled from `directory`, no default route, then `argv`."""
        for relative, content in self.files.items():
            target = directory / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
        self.prepare(directory)
        script = f"mkdir -p {HOME}; cp -rT {shlex.quote(str(directory))} {WORK}; cd {WORK}"
        script += f'; ip route del default 2>/dev/null; {self.before or ":"}; exec "$@"'
        return ("bash", "-c", script, "bash", *self.argv)


REGISTERED: list[Scenario] = []  # every scenario of the test files imported so far


def each(family: str, *scenarios: type[Scenario]) -> Callable[[Any], Any]:
    """Parametrise a test with `scenario`: heavy unless a sample, expected to fail where the scenario says so. `family`
    groups rows of the report."""

    def parameter(kind: type[Scenario]) -> Any:
        kind.family = family
        scenario = kind()
        REGISTERED.append(scenario)
        marks = [pytest.mark.timeout(400 if kind.sample else 900)]
        if not kind.sample:
            marks.append(pytest.mark.heavy)
        if kind.expected:
            marks.append(pytest.mark.xfail(strict=True, reason=kind.expected))
        return pytest.param(scenario, id=scenario.title, marks=marks)

    return pytest.mark.parametrize("scenario", [parameter(one) for one in scenarios])
