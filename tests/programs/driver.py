"""Drive one scenario through every stage, and keep what was found for the report.

Stages: start, plan, park, restore, second round, leave-running, fork, finish. The result of each is written even when a
later one fails, so that docs/reference/compatibility.md shows how far a program gets.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs.results import Ended, NeverBack, NotParked, Refused, Result, summary
from tests.programs.scenario import QUIET, Scenario
from tests.programs.terminal import Screen, Terminal
from tests.support.host import Host

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DRY = os.environ.get("PROGRAMS_DRY") == "1"  # try the scenarios themselves: nothing is checkpointed, nothing is kept
LONG = 300.0  # seconds for one command on a busy machine
CAN_MOVE = "can move"


def drive(scenario: Scenario, host: Host, directory: Path) -> None:
    """Take the scenario's program through all stages. Raise at the first that fails; the result is saved either way."""
    for tool in (scenario.argv[0], *scenario.needs):
        if shutil.which(tool, path=PATH) is None:
            pytest.skip(f"{tool} is not installed (scripts/setup --programs)")
    version = version_of(scenario)
    result = Result(scenario.title, scenario.family, version, scenario.expected, scenario.advice)
    files = directory / "files"
    files.mkdir()
    try:
        _stages(scenario, host, files, result)
    finally:
        if not DRY:
            result.save()


def version_of(scenario: Scenario) -> str:
    command = scenario.version or f"{scenario.argv[0]} --version"
    environment = {**os.environ, "PATH": PATH}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    text = done.stdout.strip() or done.stderr.strip()
    found = re.search(r"\d+(?:\.\d+)+[\w.+-]*|\d+", text)
    return found[0] if found else "?"


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
            if result.plan != CAN_MOVE:
                _refused(scenario, terminal, result.plan)
        with result.stage("park"):
            park(scenario, terminal, 1)
        with result.stage("restore"):
            _restored(scenario, terminal, 1)
        with result.stage("second round"):
            park(scenario, terminal, 2)
            _restored(scenario, terminal, 2)
        with result.stage("leave-running"):
            host.cm_json("checkpoint", terminal.session, "--leave-running", timeout=LONG)
            scenario.work(terminal, 3)
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
        return CAN_MOVE
    return "blocked: " + "; ".join(one["message"] for one in answer["findings"] if one["level"] == "block")


def _refused(scenario: Scenario, terminal: Terminal, plan: str) -> None:
    """`plan` says no: a checkpoint must be refused before anything is frozen, and the program must not notice."""
    done = terminal.host.cm("checkpoint", terminal.session, timeout=LONG)
    if done.returncode == 0:
        raise AssertionError(f"plan said {plan!r}, but checkpoint succeeded")
    _lives(scenario, terminal, 1, done.stderr.decode())
    assert done.returncode == 4, f"plan said {plan!r}, but checkpoint answered exit {done.returncode}"
    raise Refused(plan)


def park(scenario: Scenario, terminal: Terminal, number: int) -> None:
    """Park the session. When that fails, `plan` was wrong to report that it can move; the program must keep running."""
    done = terminal.host.cm("--json", "checkpoint", terminal.session, timeout=LONG)
    if done.returncode != 0:
        cause = f"exit {done.returncode}: {summary(Exception(done.stdout.decode()))}"
        _lives(scenario, terminal, number, cause)
        raise NotParked(cause)
    assert terminal.host.pids(terminal.session) == [], "parked, but processes are left"


def _lives(scenario: Scenario, terminal: Terminal, number: int, cause: str) -> None:
    try:
        scenario.work(terminal, number)
    except Exception as error:
        raise Ended(f"after a failed checkpoint ({cause}) the program does not answer: {error}") from error


def _restored(scenario: Scenario, terminal: Terminal, number: int) -> None:
    restore(terminal)
    try:
        scenario.work(terminal, number)
    except AssertionError as error:
        states = [state_of(pid) for pid in terminal.host.pids(terminal.session)]
        if states.count("T") > scenario.stopped:
            raise AssertionError(f"{states.count('T')} of {len(states)} processes are stopped: {error}") from error
        raise


def state_of(pid: int) -> str:
    """Read a process's state: "T" is stopped; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def restore(terminal: Terminal) -> None:
    done = terminal.host.cm("--json", "restore", terminal.session, timeout=LONG)
    if done.returncode != 0:
        raise NeverBack(f"exit {done.returncode}: {summary(Exception(done.stdout.decode()))}")
    assert json.loads(done.stdout)["session"] == terminal.session
