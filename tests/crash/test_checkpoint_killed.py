"""Kill each process of a checkpoint at every step: the session runs or has ended, as reported, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from cmdop_migrate.holder import cgroup
from tests.conftest import CAP_SYS_RESOURCE, has_capability
from tests.crash.witness import Witness, dumping, find, finished, gone, show, stopped
from tests.support.host import CM, Host, until
from tests.support.sampling import sample

STEPS = (
    "prepare",
    "criu",
    "freeze",
    "reset",
    "dump",
    "capture",
    "upload",
    "prove",
    "prove:complete",
    "publish",
    "park",
)
SAMPLE = 5  # steps in the default run
FROZEN = STEPS[3:]  # the session is frozen when these begin


def test_command_killed_at_every_step_leaves_the_session_running_or_parked(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Witness.start(host)
    rows = [("step", "killed", "session", "counted on from")]
    for step in sample(STEPS[:-1], SAMPLE, "checkpoint, its command killed"):
        with stopped(host, step, "checkpoint", one.name) as (cli, _):
            assert cgroup.is_frozen(host.group(one.session)) is (step in FROZEN)
            gone(cli)
        rows.append((step, "command", one.state, str(one.assert_runs())))
    with stopped(host, "park", "checkpoint", one.name) as (cli, _):  # committed: its lease says that it is parked
        gone(cli)
    until(lambda: one.state == "parked", 20, "the agent tells its holder")
    rows.append(("park", "command", one.state, "-"))
    one.assert_parked()
    host.assert_clean(ended=True)
    rows.append(("-", "-", "parked, restored", str(one.restore()["token"])))
    with capsys.disabled():
        show("checkpoint, its command killed", rows, print)


def test_holder_killed_at_every_step_ends_or_parks_the_session_and_reports_it(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("step", "killed", "exit", "session", "why")]
    for step in sample(STEPS[1:], SAMPLE, "checkpoint, its holder killed"):
        one = Witness.start(host, step.replace(":", "-"))
        with stopped(host, step, "checkpoint", one.name) as (cli, _):
            gone(psutil.Process(host.holder(one.session)))
            cli.send_signal(signal.SIGCONT)
            status, answer = finished(cli)
        if step == "park":  # it was committed: nothing of the session is lost
            assert status == 0 and one.state == "parked", answer
            host.assert_clean(ended=True)
            rows.append((step, "holder", str(status), one.state, "-"))
            assert host.cm_json("restore", one.session)["token"] == 2
            one.assert_runs()
            continue
        assert (status, answer["error"]["code"]) in ((4, "session_exited"), (4, "blocked")), answer
        assert one.state == "exited"
        assert one.record()["exit"]["reason"] == "its holder died"
        host.assert_clean(ended=True)
        rows.append((step, "holder", str(status), one.state, answer["error"]["message"]))
    with capsys.disabled():
        show("checkpoint, the session's holder killed", rows, print)


def test_criu_killed_in_the_dump_leaves_the_session_running(host: Host) -> None:
    """The code that CRIU injected into the session's processes notices that CRIU is gone, and restores their state."""
    one = Witness.start(host, size=100)
    with dumping(one) as (cli, criu):
        criu.kill()
        status, answer = finished(cli)
    assert (status, answer["error"]["code"]) == (8, "criu_failed"), answer
    one.assert_runs()
    host.cm_json("checkpoint", one.name)
    one.restore()


@pytest.mark.parametrize("delay", [0.0, 0.03, 0.06, 0.1])
def test_criu_killed_at_any_time_leaves_the_session_whole_or_ended(host: Host, delay: float) -> None:
    """In the one or two milliseconds in which CRIU's first instructions are in a process, its death is that process's
    (docs/concepts.md): then that is reported, and no process of it is left."""
    one = Witness.start(host)
    cli = subprocess.Popen(
        [*CM, "--json", "checkpoint", one.name], env=host.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    criu = until(lambda: find(cli.pid, "swrk"), 20, "CRIU runs")
    time.sleep(delay)
    with contextlib.suppress(psutil.NoSuchProcess):  # on a fast machine it is done by now
        criu.kill()
    status, answer = finished(cli)
    if status == 0:
        one.restore()
        return
    assert (status, answer["error"]["code"]) in ((8, "criu_failed"), (4, "session_exited")), answer
    time.sleep(0.2)
    if one.state == "exited":
        assert one.record()["exit"]["reason"] in ("killed by SIGTRAP", "exited 133")  # of its first process, or a child
        host.assert_clean(ended=True)
        return
    one.assert_runs()
    host.cm_json("checkpoint", one.name)
    one.restore()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_terminating_signals_do_not_end_criu(host: Host, number: signal.Signals) -> None:
    one = Witness.start(host, size=100)
    with dumping(one) as (cli, criu):
        if has_capability(CAP_SYS_RESOURCE):  # nor does the kernel choose it when memory runs out
            assert Path(f"/proc/{criu.pid}/oom_score_adj").read_text() == "-1000\n"
        criu.send_signal(number)
        criu.resume()
        status, answer = finished(cli)
    assert status == 0, answer
    one.restore()


def test_ctrl_c_in_the_dump_waits_until_criu_releases_the_session(host: Host) -> None:
    one = Witness.start(host, size=100)
    with dumping(one) as (cli, criu):
        cli.send_signal(signal.SIGINT)
        time.sleep(4)
        assert cli.poll() is None and criu.is_running()
        criu.resume()
        status, answer = finished(cli)
    assert status == 130, answer
    one.assert_runs()
    assert host.cm_json("checkpoints", "ls")["checkpoints"] == []


def test_stopped_command_keeps_the_session_frozen_and_its_death_thaws_it(host: Host) -> None:
    one = Witness.start(host)
    with stopped(host, "capture", "checkpoint", one.name) as (cli, _):
        assert one.state in ("frozen", "checkpointing")
        before = len(one.numbers())
        time.sleep(0.5)
        assert len(one.numbers()) == before
        gone(cli)
    assert one.assert_runs() >= before


def test_stopped_command_finishes_after_sigcont(host: Host) -> None:
    one = Witness.start(host)
    with stopped(host, "dump", "checkpoint", one.name) as (cli, _):
        time.sleep(0.3)
        cli.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 0, answer
    one.assert_parked()
    one.restore()


@pytest.mark.parametrize("step", ["prepare", "dump", "upload"])
def test_ctrl_c_aborts_the_checkpoint_and_the_session_keeps_running(host: Host, step: str) -> None:
    one = Witness.start(host)
    with stopped(host, step, "checkpoint", one.name) as (cli, _):
        cli.send_signal(signal.SIGINT)
        cli.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 130, answer
    one.assert_runs()
    assert host.cm_json("checkpoints", "ls")["checkpoints"] == []
    assert not (host.state / "store" / "uploads").exists() or not os.listdir(host.state / "store" / "uploads")


def test_second_simultaneous_checkpoint_is_refused_without_harm(host: Host) -> None:
    one = Witness.start(host)
    with stopped(host, "dump", "checkpoint", one.name) as (cli, _):
        before = len(one.numbers())
        error = host.fails("checkpoint", one.name, status=4, code="blocked")
        assert "already" in error["message"]
        assert cgroup.is_frozen(host.group(one.session)), "the other one thawed it"
        assert len(one.numbers()) == before
        cli.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 0, answer
    one.assert_parked()
    assert one.restore()["checkpoint"] == answer["checkpoint"]


def test_kill_of_a_frozen_session_wins_over_its_checkpoint(host: Host) -> None:
    for step in ("dump", "publish"):
        one = Witness.start(host, step.replace(":", "-"))
        with stopped(host, step, "checkpoint", one.name) as (cli, _):
            host.cm_json("kill", one.name, "--signal", "KILL")
            cli.send_signal(signal.SIGCONT)
            status, answer = finished(cli)
        assert (status, answer["error"]["code"]) == (4, "session_exited"), answer
        assert one.state == "exited"
    assert host.cm_json("checkpoints", "ls")["checkpoints"] == [], "what was killed must not come back"
    host.assert_clean(ended=True)


def test_leftovers_of_a_killed_dump_are_not_in_the_next_image(host: Host) -> None:
    one = Witness.start(host)
    with stopped(host, "capture", "checkpoint", one.name) as (cli, _):
        images = host.state / "sessions" / one.session / "dump"
        (images / "core-4711.img").write_bytes(b"of a process that is no more")
        gone(cli)
    done = host.cm_json("checkpoint", one.name)
    assert one.restore()["checkpoint"] == done["checkpoint"]


def test_session_that_exits_during_its_checkpoint_is_reported_as_exited(host: Host) -> None:
    facts = host.start("sh", "-c", "read line; exit 3", name="brief")
    with stopped(host, "freeze", "checkpoint", "brief") as (cli, _):
        host.cm_json("send", "brief", "go", "--enter")
        until(lambda: not host.pids(facts["session"]), 10, "it ends")
        cli.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert (status, answer["error"]["code"]) == (4, "session_exited"), answer
    assert "exited 3" in answer["error"]["message"]
