"""Drive one scenario through every stage, and keep what was found for the report.

Stages: start, plan, park, restore, second round, leave-running, fork, finish. The result of each is written even when a
later one fails, so that docs/compatibility.md shows how far a program gets.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from tests.hosts import Host
from tests.programs.scenario import CACHE, QUIET, Scenario
from tests.programs.terminal import Screen, Terminal

RESULTS = CACHE / "results"
STAGES = ("start", "plan", "park", "restore", "second round", "leave-running", "fork", "finish")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DRY = os.environ.get("PROGRAMS_DRY") == "1"  # try the scenarios themselves: nothing is checkpointed, nothing is kept
LONG = 300.0  # seconds for one command on a busy machine


@dataclass
class Result:
    """What one run found; `stages` maps a stage to "ok", or to the first line of what went wrong."""

    name: str
    family: str
    version: str
    plan: str = ""
    expected: str = ""
    advice: str = ""
    stages: dict[str, str] = field(default_factory=dict)
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date().isoformat())
    kernel: str = field(default_factory=platform.release)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.stages[name] = summary(error)
            raise
        self.stages[name] = "ok"

    def save(self) -> None:
        RESULTS.mkdir(parents=True, exist_ok=True)
        where = RESULTS / (re.sub(r"[^A-Za-z0-9.]+", "-", self.name) + ".json")
        where.write_text(json.dumps(asdict(self), indent=1) + "\n")


def summary(error: BaseException) -> str:
    """One line that names the cause: the command's own message where a command failed."""
    text = str(error) or type(error).__name__
    found = re.search(r"cmdop-migrate: (.*)", text)
    line = found[1] if found else text.strip().splitlines()[0]
    return line[:300]


def version_of(scenario: Scenario) -> str:
    command = scenario.version or f"{scenario.argv[0]} --version"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    text = done.stdout.strip() or done.stderr.strip()
    found = re.search(r"\d+(?:\.\d+)+[\w.+-]*|\d+", text)
    return found[0] if found else "?"


def drive(scenario: Scenario, host: Host, directory: Path) -> None:
    """Take the scenario's program through all stages. Raises at the first that fails; the result is saved either way."""
    for tool in (scenario.argv[0], *scenario.needs):
        if shutil.which(tool, path=PATH) is None:
            pytest.skip(f"{tool} is not installed (scripts/setup --programs)")
    result = Result(scenario.title, scenario.family, version_of(scenario), "", scenario.expected, scenario.advice)
    files = directory / "files"
    files.mkdir()
    try:
        _stages(scenario, host, files, result)
    finally:
        if not DRY:
            result.save()


def _stages(scenario: Scenario, host: Host, files: Path, result: Result) -> None:
    options = [word for pair in {**QUIET, **scenario.env}.items() for word in ("--env", "=".join(pair))]
    with contextlib.ExitStack() as stack:
        with result.stage("start"):
            started = host.start(*scenario.command(files), name="p", options=tuple(options))
            terminal = Terminal(host, "p", started["session"], Screen(scenario.rows, scenario.columns))
            stack.enter_context(terminal)
            scenario.state(terminal)
        if DRY:
            for number in (1, 2, 3, 4):
                scenario.work(terminal, number)
            scenario.finish(terminal)
            return
        with result.stage("plan"):
            result.plan = verdict(host)
            if result.plan != "can move":
                _refused(scenario, terminal, result)
        with result.stage("park"):
            park(terminal)
        with result.stage("restore"):
            restore(terminal)
            scenario.work(terminal, 1)
        with result.stage("second round"):
            park(terminal)
            restore(terminal)
            scenario.work(terminal, 2)
        with result.stage("leave-running"):
            host.cm_json("checkpoint", terminal.session, "--leave-running", timeout=LONG)
            scenario.work(terminal, 3)
        if scenario.forks:
            with result.stage("fork"), terminal.branch("branch") as branch:
                scenario.work(branch, 4)
                scenario.work(terminal, 4)
        with result.stage("finish"):
            scenario.finish(terminal)


def verdict(host: Host) -> str:
    """The word of `plan`: "can move", or "blocked" and why."""
    done = host.cm("--json", "plan", "p", timeout=LONG)
    answer = json.loads(done.stdout)
    if "error" in answer:
        return f"blocked: {answer['error']['message']}"
    if answer["ok"]:
        return "can move"
    return "blocked: " + "; ".join(one["message"] for one in answer["findings"] if one["level"] == "block")


def _refused(scenario: Scenario, terminal: Terminal, result: Result) -> None:
    """`plan` says no: a checkpoint must be refused before anything is frozen, and the program must not notice."""
    done = terminal.host.cm("checkpoint", terminal.session, timeout=LONG)
    assert done.returncode == 4, f"plan says {result.plan!r}, but checkpoint answered exit {done.returncode}"
    scenario.work(terminal, 1)
    raise AssertionError(f"refused, and runs on: {result.plan}")


def park(terminal: Terminal) -> None:
    """Park the session; when that fails, `plan` was wrong to say that it can move."""
    saved = terminal.host.cm_json("checkpoint", terminal.session, timeout=LONG)
    assert terminal.host.pids(terminal.session) == []
    assert saved["session"] == terminal.session


def restore(terminal: Terminal) -> None:
    back = terminal.host.cm_json("restore", terminal.session, timeout=LONG)
    assert back["session"] == terminal.session
