"""reap: idle sessions are parked, all others stay; so does a session that becomes active before it is frozen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cmdop_migrate.host.resources import TEST_STOP
from tests.support import fenced_sessions
from tests.support.host import CM, PROJECT, Host, a_host, until
from tests.support.patience import bound
from tests.support.pty_client import Pty

BURN = "while :; do :; done"  # works, and says nothing


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Host]:
    """Its agent comes by every second, and holders look then."""
    with a_host(tmp_path, ttl="3s") as one:
        yield one


def quiet(host: Host, name: str, *options: str) -> str:
    command = 'echo ready; while read -r line; do echo "did $line"; done'
    session: str = host.start("bash", "-c", command, name=name, options=options)["session"]
    host.wait_for(session, "ready")
    return session


def idle(host: Host, session: str) -> float:
    (row,) = [one for one in host.sessions() if one["session"] == session]
    return float(row["idle_s"])


def states(host: Host) -> dict[str, str]:
    return {one["name"]: one["state"] for one in host.sessions()}


def test_reap_parks_only_idle_sessions(quick: Host) -> None:
    session = quiet(quick, "quiet")
    quick.start("bash", "-c", BURN, name="works")
    quick.start("bash", "-c", fenced_sessions.COUNT, name="prints")
    watched, typed = quiet(quick, "watched"), quiet(quick, "typed")
    with Pty([*CM, "attach", watched], quick.env()) as person:
        person.expect(b"ready", 20)
        until(lambda: idle(quick, session) > 8, 40, "it has been quiet for a while")
        quick.ok("checkpoint", "quiet", "--leave-running")
        assert idle(quick, session) > 8, "to be copied is not to be used"
        quick.ok("send", typed, "x")  # not even a whole line
        dry = quick.cm_json("reap", "--idle", "8s", "--dry-run")
        assert [(one["session"], one["how"]) for one in dry["reaped"]] == [(session, "parked")] and dry["dry_run"]
        assert states(quick) == dict.fromkeys(("quiet", "works", "prints", "watched", "typed"), "running")
        quick.ok("send", typed, "y")
        done = quick.cm_json("reap", "--idle", "8s")
    left = time.monotonic()
    (one,) = done["reaped"]
    assert (one["session"], one["name"], one["how"]) == (session, "quiet", "parked") and one["idle_s"] >= 8
    assert done["failed"] == [] and done["left"] == []
    event = fenced_sessions.event(quick, session, "reaped")
    assert (event["how"], event["checkpoint"]) == ("parked", one["checkpoint"])
    expected = dict.fromkeys(("works", "prints", "watched", "typed"), "running")
    assert states(quick) == {**expected, "quiet": "parked"}
    assert quick.cm_json("restore", "quiet")["checkpoint"] == one["checkpoint"]
    quick.ok("send", "quiet", "again", "--enter")
    quick.wait_for("quiet", "did again")
    assert idle(quick, watched) < time.monotonic() - left + 2, "it counts from when the last one left"


def test_reap_destroy_ends_sessions(quick: Host) -> None:
    session = quiet(quick, "quiet")
    until(lambda: idle(quick, session) > 1.5, 20, "quiet")
    said = quick.ok("reap", "--idle", "1s", "--destroy")
    assert "destroyed" in said and "quiet" in said
    assert states(quick) == {"quiet": "exited"} and quick.cm_json("checkpoints", "ls")["checkpoints"] == []
    event = fenced_sessions.event(quick, session, "reaped")
    assert (event["how"], event["checkpoint"]) == ("destroyed", None)
    done = quick.cm("reap", "--idle", "1s")
    assert done.returncode == 0 and b"No session has been idle" in done.stderr


def test_reap_reports_failures_and_continues(quick: Host) -> None:
    hook = quick.dir / "no"
    hook.write_text("#!/bin/sh\necho never\nexit 1\n")
    hook.chmod(0o755)
    stays = quiet(quick, "stays", "--hook", f"pre-freeze={hook}")
    goes = quiet(quick, "goes")
    until(lambda: idle(quick, goes) > 1.5 and idle(quick, stays) > 1.5, 20, "quiet")
    done = quick.cm("--json", "reap", "--idle", "1s")
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 10 and answer["error"]["code"] == "partial"
    assert [one["name"] for one in answer["reaped"]] == ["goes"]
    (failed,) = answer["failed"]
    assert failed["name"] == "stays" and "never" in failed["error"]
    quick.ok("send", stays, "x", "--enter")
    quick.wait_for(stays, "did x")


@pytest.mark.parametrize("options", [(), ("--destroy",)])
def test_session_active_again_before_the_freeze_is_left(quick: Host, options: tuple[str, ...]) -> None:
    session = quiet(quick, "quiet")
    until(lambda: idle(quick, session) > 5, 20, "quiet")
    cli = subprocess.Popen(
        [*CM, "--json", "reap", "--idle", "5s", *options],
        env=quick.env(**{TEST_STOP: "checkpoint:freeze" if not options else "reap:destroy"}),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        standing = until(lambda: fenced_sessions._standing(cli), 30, "it is about to")
        quick.ok("send", session, "wait", "--enter")
        quick.wait_for(session, "did wait")
        os.kill(standing.pid, signal.SIGCONT)
        answer = json.loads(cli.communicate(timeout=30)[0])
    finally:
        cli.kill()
        cli.wait()
    assert cli.returncode == 0 and answer["reaped"] == [] and [one["name"] for one in answer["left"]] == ["quiet"]
    quick.ok("send", session, "on", "--enter")
    quick.wait_for(session, "did on")


def test_reap_destroy_does_not_discard_a_session_parked_in_between(quick: Host) -> None:
    session = quiet(quick, "quiet")
    until(lambda: idle(quick, session) > 1.5, 20, "quiet")
    with fenced_sessions.stopped_at(quick, "destroy", "reap", "--idle", "1s", "--destroy") as (cli, standing):
        quick.ok("checkpoint", session)
        standing.resume()
        answer = json.loads(cli.communicate(timeout=30)[0])
    assert cli.returncode == 0 and answer["reaped"] == [] and [one["name"] for one in answer["left"]] == ["quiet"]
    quick.ok("restore", session)
    quick.ok("send", session, "on", "--enter")
    quick.wait_for(session, "did on")


def test_session_ended_or_parked_before_its_turn_is_not_a_failure(quick: Host) -> None:
    sessions = {name: quiet(quick, name) for name in ("first", "ends", "parks")}
    until(lambda: all(idle(quick, one) > 1.5 for one in sessions.values()), 20, "quiet")
    cli = subprocess.Popen(
        [*CM, "--json", "reap", "--idle", "1s"],
        env=quick.env(**{TEST_STOP: "checkpoint:prepare"}),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        standing = until(lambda: fenced_sessions._standing(cli), 30, "it is about to")
        quick.ok("kill", "ends")
        quick.ok("checkpoint", "parks")
        os.kill(standing.pid, signal.SIGCONT)
        answer = json.loads(cli.communicate(timeout=30)[0])
    finally:
        cli.kill()
        cli.wait()
    assert cli.returncode == 0, answer
    assert [one["name"] for one in answer["reaped"]] == ["first"] and answer["failed"] == []
    assert sorted(one["name"] for one in answer["left"]) == ["ends", "parks"]


def test_activity_of_a_pre_freeze_hook_does_not_count_but_a_client_does(quick: Host) -> None:
    session = quiet(quick, "quiet")
    hook = quick.dir / "hooks/pre-freeze.d/one"
    hook.parent.mkdir(parents=True)
    said = quick.dir / "said"
    wake = f"PYTHONPATH={PROJECT} {sys.executable} -m cmdop_migrate send quiet flush --enter"
    hook.write_text(f"#!/bin/sh\ncat > {said}\n{wake}\n")
    hook.chmod(0o755)
    until(lambda: idle(quick, session) > 1.5, 20, "quiet")
    (one,) = quick.cm_json("reap", "--idle", "1s")["reaped"]
    assert one["session"] == session and json.loads(said.read_text())["reason"] == "reap"


def test_reap_refuses_bad_input(quick: Host) -> None:
    quick.fails("reap", status=2, code="usage")
    quick.fails("reap", "--idle", "0", status=2, code="usage")
    quick.fails("reap", "--idle", "-1s", status=2, code="usage")
    quick.fails("reap", "--idle", "soon", status=2, code="usage")
    began = time.monotonic()
    assert quick.cm_json("reap", "--idle", "1ms")["reaped"] == [] and time.monotonic() - began < bound(30)
