"""Run a session that counts for tests of `plan`, and prove that nothing ever froze it.

with Counting(host) as counting:
    answer = counting.plan("--to", "host-b")      # the whole answer; it counts on meanwhile
    blocks(answer, "io_uring", "python")
"""

from __future__ import annotations

import json
import re
import select
import shlex
from pathlib import Path
from types import TracebackType
from typing import Any

from cmdop_migrate import config
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host as LocalHost
from tests.support.host import CM, Host, until

COUNTER = "i=0; while :; do i=$((i+1)); echo n=$i; sleep .01; done"


class Unfrozen:
    """Watch whether a cgroup is ever frozen: the kernel wakes pollers of cgroup.events at every change."""

    def __init__(self, group: str) -> None:
        self._file = open(f"{group}/cgroup.events", "rb", buffering=0)
        self._file.read()
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLPRI)

    def changed(self) -> bool:
        found = bool(self._poll.poll(0))
        self._file.seek(0)
        self._file.read()
        return found

    def close(self) -> None:
        self._file.close()


class Counting:
    """Run a session that prints numbers while `script` runs in it."""

    def __init__(self, host: Host, script: str = "", name: str = "t", options: tuple[str, ...] = ()) -> None:
        self.host, self.name = host, name
        begin = f"{script} & " if script else ""
        self.session: str = host.start("bash", "-c", begin + COUNTER, name=name, options=options)["session"]
        self._records = LocalHost(config.load(environ=host.env()))

    def __enter__(self) -> Counting:
        self.host.wait_for(self.name, "n=3\\b")
        self.unfrozen = Unfrozen(self.host.group(self.session))
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self.unfrozen.close()
        self.host.cm("kill", "--signal", "KILL", self.name)

    def numbers(self) -> list[int]:
        data = talk.output(self._records, self.name, None).data
        return [int(one) for one in re.findall(rb"n=(\d+)\r?\n", data)]

    def allow_freeze(self) -> None:
        """Ignore the freezes that the test itself has just caused."""
        self.unfrozen.changed()

    def plan(self, *options: str, **more: Any) -> dict[str, Any]:
        """Return what `plan --json` answers. Assert that its exit status agrees, and that the session was not frozen."""
        before = self.numbers()[-1]
        done = self.host.cm("--json", "plan", self.name, *options, **more)
        answer: dict[str, Any] = json.loads(done.stdout)
        assert "error" not in answer, answer
        assert done.returncode == (0 if answer["ok"] else 4), (done.returncode, answer)
        levels = [one["level"] for one in answer["findings"]]
        assert answer["ok"] == ("block" not in levels)
        fields = {"check", "level", "message", "fix", "passing"}
        assert all(set(one) == fields and one["fix"] for one in answer["findings"])
        assert not self.unfrozen.changed(), "it was frozen"
        until(lambda: self.numbers()[-1] > before, 5, "it counts on")
        numbers = self.numbers()
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "a number is missing or doubled"
        return answer


def said(answer: dict[str, Any], check: str) -> list[tuple[str, str]]:
    """Return level and message of one check's findings."""
    return [(one["level"], one["message"]) for one in answer["findings"] if one["check"] == check]


def blocks(answer: dict[str, Any], check: str, names: str) -> None:
    """Assert that the plan is blocked by this check, and by nothing else."""
    blockers = [(one["check"], one["message"]) for one in answer["findings"] if one["level"] == "block"]
    assert {one for one, _ in blockers} == {check} and names in blockers[0][1], answer["findings"]


def command_of(host: Host, place: Path, before: str = "", own_network: bool = True) -> Path:
    """Return a program that runs `cmdop-migrate` of that host in its own mount namespace and network; `before` is shell
    code that runs there first."""
    place.mkdir()
    wanted = ("CMDOP_MIGRATE_", "PYTHON", "LANG", "TERM")
    settings = [f"export {key}={shlex.quote(value)}" for key, value in host.env().items() if key.startswith(wanted)]
    network = ["ip link set lo up"] if own_network else []
    inner = ["#!/bin/sh -e", *settings, "cd /", *network, before, f'exec {shlex.join(CM)} "$@"', ""]
    flags = "--mount --propagation private" + (" --net" if own_network else "")
    (place / "inner").write_text("\n".join(inner))
    (place / "command").write_text(f'#!/bin/sh\nexec unshare {flags} {place}/inner "$@"\n')
    for one in place.iterdir():
        one.chmod(0o755)
    return place / "command"
