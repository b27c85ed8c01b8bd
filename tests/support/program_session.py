"""Run a program in a session, and take it through checkpoints and restores.

with Program(host, "bash", "--norc") as bash:
    bash.type("sleep 100 &\\n")
    bash.see(r"\\[1\\]")
    bash.through()                 # parked, gone, restored; nothing lost, nothing appeared
    bash.type("jobs\\n")
    bash.see("Running")
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cmdop_migrate import config
from cmdop_migrate.errors import TimedOut
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host as LocalHost
from tests.support import session_diff
from tests.support.host import Host, until
from tests.support.patience import bound

WITHIN = 20.0


class Program:
    def __init__(self, host: Host, *command: str, name: str = "p", options: tuple[str, ...] = ()) -> None:
        self.host, self.name = host, name
        self.session: str = host.start(*command, name=name, options=options)["session"]
        self.records = LocalHost(config.load(environ=host.env()))
        self.seq = 0  # output before this has been looked at

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.host.pids(self.session):
            self.host.cm("kill", "--signal", "KILL", self.name)
        else:
            self.records.forget(self.session)  # it is parked, or was never restored

    def type(self, text: str) -> dict[str, Any]:
        return talk.send(self.records, self.name, text.encode(), "tester")

    def see(self, pattern: str, within: float = WITHIN) -> str:
        """Wait for `pattern` in output not yet read; what follows the match is left for the next call."""
        try:
            found = talk.wait(self.records, self.name, pattern, bound(within), self.seq)
        except TimedOut:
            found = {}
        assert "matched" in found, f"no {pattern!r}: {found}\n{self.output()[-3000:]}"
        self.seq = found["seq"]
        return str(found["matched"])

    def output(self) -> str:
        return talk.output(self.records, self.name, None).data.decode(errors="replace")

    def look(self) -> session_diff.Facts:
        return session_diff.settled(lambda: self.host.pids(self.session))

    def park(self, *options: str) -> dict[str, Any]:
        saved = self.host.cm_json("checkpoint", self.name, *options)
        assert self.host.pids(self.session) == []
        assert saved["session"] == self.session
        return saved

    def back(self, *options: str) -> dict[str, Any]:
        facts = self.host.cm_json("restore", self.name, *options)
        assert facts["session"] == self.session
        return facts

    def through(self, allowed: Iterable[str] = (), still: bool = True) -> dict[str, Any]:
        """Park and restore the session; with `still` it does nothing by itself, so all of its visible state must be equal."""
        before = self.look() if still else {}
        saved = self.park()
        self.back()
        if still:
            session_diff.same(before, self.look(), allowed)
        return saved

    def path(self, inside: str) -> Path:
        """Return the path by which this host reaches a file of the session."""
        pid = min(self.host.pids(self.session))
        return Path(f"/proc/{pid}/root") / inside.lstrip("/")

    def read(self, inside: str, within: float = WITHIN) -> str:
        """Return the content of a file of the session, once it exists and is not empty."""

        def content() -> str:
            try:
                return self.path(inside).read_text()
            except FileNotFoundError:
                return ""

        return until(content, within, f"{inside} in the session; it printed: {self.output()[-2000:]}")
