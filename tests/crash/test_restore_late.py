"""Stop a holder past its lease deadline while its session is restored: no copy runs past it, no command hangs, and the
checkpoint stays. And the next command ends processes that no record describes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cmdop_migrate.clock import boottime
from cmdop_migrate.holder import cgroup
from tests.crash.witness import Witness, finished, gone, stopped
from tests.support.fork_server import lives
from tests.support.host import Host, a_host, until

TTL = 2.0


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Host]:
    with a_host(tmp_path, ttl=f"{TTL:g}s") as host:
        yield host


@contextlib.contextmanager
def late_holder(one: Witness, step: str) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """Continue a restore from `step` with a stopped holder; yield its command and that holder."""
    with stopped(one.host, step, "restore", one.name) as (cli, worker):
        (pid,) = until(lambda: one.host.holders(one.session), 10, "its holder is there")
        holder = psutil.Process(pid)
        holder.suspend()
        try:
            worker.send_signal(signal.SIGCONT)
            yield cli, holder
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                holder.resume()


def sleep_past(seconds: float) -> None:
    end = boottime() + seconds
    until(lambda: boottime() >= end, seconds + 10)


@pytest.mark.parametrize("continued", [True, False])
def test_holder_stopped_before_it_adopts_the_session(quick: Host, continued: bool) -> None:
    one = Witness.start(quick)
    quick.cm_json("checkpoint", one.name)
    counted = len(one.numbers())
    with late_holder(one, "pre-resume") as (cli, holder):
        if continued:
            sleep_past(3 * TTL)
            holder.resume()
        status, answer = finished(cli)
    assert (status, answer["error"]["code"]) == (11, "timed_out"), answer
    one.assert_parked()
    assert len(one.numbers()) == counted, "it ran"
    quick.assert_clean(ended=True)
    one.restore()


def test_holder_stopped_while_the_session_is_resumed(quick: Host) -> None:
    """The session runs already: it is frozen at its deadline and resumes when its lease is renewed."""
    one = Witness.start(quick)
    quick.cm_json("checkpoint", one.name)
    group = quick.group(one.session)
    with late_holder(one, "resumed") as (cli, holder):
        until(lambda: cgroup.is_frozen(group), 5 * TTL, "frozen at its deadline")
        assert cli.poll() is None
        holder.resume()
        status, answer = finished(cli)
    assert status == 0, answer
    until(lambda: one.state == "running", 20, "its lease is renewed")
    one.assert_runs()


@pytest.mark.parametrize("step", ["pre-resume", "resumed"])
def test_next_command_ends_a_stopped_holder_whose_command_was_killed(quick: Host, step: str) -> None:
    one = Witness.start(quick)
    quick.cm_json("checkpoint", one.name)
    with stopped(quick, step, "restore", one.name) as (cli, worker):
        (pid,) = until(lambda: quick.holders(one.session), 10, "its holder is there")
        holder = psutil.Process(pid)
        holder.suspend()
        gone(cli)
        gone(worker)
        one.assert_parked()  # by a command
        assert not lives(holder)
    quick.assert_clean(ended=True)
    one.restore()


def test_next_command_ends_the_stopped_holder_of_a_trial(quick: Host) -> None:
    one = Witness.start(quick)
    known = set(quick.holders(one.session))
    with stopped(quick, "prove:complete", "checkpoint", one.name) as (cli, worker):
        (pid,) = until(lambda: set(holder_pids(quick)) - known, 10, "the trial has a holder")
        holder = psutil.Process(pid)
        holder.suspend()
        gone(cli)
        gone(worker)
        quick.ok("ls")
        assert not lives(holder)
    one.assert_runs()
    assert set(holder_pids(quick)) == known
    assert os.listdir(quick.state / "sessions") == [one.session]


def holder_pids(host: Host) -> list[int]:
    found = []
    for pid in cgroup.pids(host.group("holders")):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("holder.process" in word for word in psutil.Process(pid).cmdline()):
                found.append(pid)
    return found


@pytest.mark.parametrize("known", [True, False])
def test_next_command_ends_processes_without_a_record(host: Host, known: bool) -> None:
    session = host.start("true", name="t")["session"]
    until(lambda: host.sessions()[0]["state"] == "exited", 10, "it has ended")
    group = host.group(session if known else "0" * 24)
    cgroup.create(group)
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as left:
        try:
            cgroup.join(group, left.pid)
            cgroup.freeze(group)
            host.ok("ls")
            assert left.wait(5) == -signal.SIGKILL and not os.path.exists(group)
        finally:
            left.kill()
