"""Drive the processes of a spec from outside their session: ask each, stop some, continue them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.random_programs.generator import BY_TERMINAL, Spec
from tests.support.host import Host, until
from tests.support.program_session import Program

INSIDE = Path(__file__).parent / "inside"
DIRECTORY = "/root/rand"
WITHIN = 60.0


class Refused(AssertionError):
    """Report that a worker answered with an error: it could not build, or found its state wrong."""


class Subject:
    """A session that runs a spec. Use as a context: the session is ended at the exit, also after an error."""

    def __init__(self, host: Host, spec: Spec, name: str = "rand") -> None:
        self.host, self.spec = host, spec
        script = host.dir / "spec"
        script.mkdir(exist_ok=True)
        path = script / f"{name}.json"
        path.write_text(spec.to_json())
        command = (sys.executable, "-I", "-B", "-S", str(INSIDE), str(path), DIRECTORY)
        self.program = Program(host, *command, name=name)
        self.numbers = itertools.count(1)
        self.pids: dict[int, int] = {}  # process of the spec -> its pid in the session

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self.program.__exit__()

    @property
    def session(self) -> str:
        return self.program.session

    def built(self) -> None:
        """Wait until every process has built what it holds."""
        for one in self.spec.processes:
            self.pids[one.number] = self._answer(one.number, 0)["pid"]

    def _answer(self, process: int, number: int) -> dict[str, Any]:
        name = f"{DIRECTORY}/{process}.{number}.json"

        def read() -> dict[str, Any] | None:
            try:
                return json.loads(self.program.path(name).read_text())  # type: ignore[no-any-return]
            except (FileNotFoundError, ValueError):  # not there yet, or the session has no process yet
                return None

        found = until(read, WITHIN, f"process {process} answers; the session printed: {self._printed()}")
        if "error" in found:
            raise Refused(f"process {process}: {found['error'].strip()}")
        return found

    def _printed(self) -> str:
        return self.program.output()[-1000:]

    def order(self, process: int, word: str, *args: object) -> int:
        """Send a command to one process; return its number, for `_answer`."""
        number = next(self.numbers)
        line = " ".join(map(str, (number, word, *args))) + "\n"
        fd = os.open(self.program.path(f"{DIRECTORY}/{process}.ctl"), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)
        return number

    def ask(self, process: int, word: str, *args: object) -> Any:
        return self._answer(process, self.order(process, word, *args)).get("value")

    def ask_all(self, word: str) -> dict[int, Any]:
        orders = {one.number: self.order(one.number, word) for one in self.spec.processes}
        return {process: self._answer(process, number).get("value") for process, number in orders.items()}

    # --- states

    def take_positions(self) -> None:
        """Set the foreground groups and type ahead. Call after `built`."""
        for leader in self.spec.processes:
            if leader.foreground is not None:
                self.ask(leader.number, "foreground", self.pids[leader.foreground])
        if self.spec.typed:
            self.program.type("typed-ahead\n")

    def stop(self) -> dict[int, int]:
        """Stop what the spec wants stopped; return the orders that are answered when it is continued."""
        orders = {}
        for one in self.spec.processes:
            # A group that the terminal stops takes all its members with it: none of them hears an order after that.
            if one.stop and not self._stopped(one.number):
                word = {"TTIN": ("line",), "TTOU": ("modes",)}.get(one.stop, ("stop", one.stop))
                orders[one.number] = self.order(one.number, *word)
                until(lambda number=one.number: self._stopped(number), WITHIN, f"process {one.number} stops")
        return orders

    def _stat(self, process: int) -> list[str]:
        path = self.program.path(f"/proc/{self.pids[process]}/stat")
        return path.read_text().rpartition(")")[2].split()

    def _stopped(self, process: int) -> bool:
        return self._stat(process)[0] == "T"

    def resume(self, orders: dict[int, int]) -> None:
        """Continue everything that is stopped: what the terminal stopped, in the foreground with a line to read."""
        by_terminal = [one for one in self.spec.processes if one.number in orders and one.stop in BY_TERMINAL]
        waiting = {one.number for one in by_terminal}
        self._continue({pid for pid in self.host.pids(self.session) if self._group(pid) not in self._groups(waiting)})
        if self.spec.typed:
            self.ask(0, "foreground", self.pids[0])
            found = self.ask(0, "line")
            assert found == "typed-ahead", f"the line that was typed ahead is {found!r} after the restore"
        for one in by_terminal:
            leader = self.spec.terminal_of(one.number)
            assert leader is not None
            self.ask(leader, "foreground", self.pids[one.number])
            self._continue({pid for pid in self.host.pids(self.session) if self._group(pid) == self.pids[one.number]})
            if one.stop == "TTIN":
                self._type(leader, "a-line")
            found = self._answer(one.number, orders[one.number]).get("value")
            assert found == ("a-line" if one.stop == "TTIN" else None), f"process {one.number} read {found!r}"
        for process, number in orders.items():
            self._answer(process, number)

    def _type(self, leader: int, text: str) -> None:
        parent = self.spec.processes[leader].parent
        if parent is None:
            self.program.type(f"{text}\n")
        else:
            self.ask(parent, "type", leader, text)

    def _groups(self, processes: set[int]) -> set[int]:
        return {self.pids[one] for one in processes}

    def _group(self, pid: int) -> int:
        """Return the process group of a process of the session, in the session's own numbers."""
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except FileNotFoundError:
            return -1
        return next(int(line.split()[-1]) for line in lines if line.startswith("NSpgid"))

    def _continue(self, pids: set[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
