"""The lease deadline passes while CRIU has the session thawed for the dump: CRIU's injected code is frozen with the
processes, and must resume when they do. A session that was frozen before the dump is frozen after it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cmdop_migrate.holder import cgroup
from tests.crash.witness import Witness, dumping, finished, gone
from tests.support.host import Host, a_host, until


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Host]:
    with a_host(tmp_path, ttl="3s") as host:
        yield host


@contextlib.contextmanager
def no_agent(host: Host, one: Witness) -> Iterator[None]:
    """Until its time has run out; and then for as long as this lasts."""
    agent = host.agent_pid()
    assert agent is not None
    os.kill(agent, signal.SIGSTOP)
    try:
        until(lambda: [event for event in host.events(one.session) if event["event"] == "fenced"], 15, "fenced")
        yield
    finally:
        os.kill(agent, signal.SIGCONT)


def test_lease_deadline_during_the_dump_only_delays_it(quick: Host) -> None:
    one = Witness.start(quick, size=100)
    group = quick.group(one.session)
    with dumping(one) as (cli, criu):
        with no_agent(quick, one):
            criu.resume()
            time.sleep(1)
            assert cli.poll() is None and cgroup.is_frozen(group), "not even CRIU's code runs in it"
        status, answer = finished(cli)
    assert status == 0, answer
    one.assert_parked()
    one.restore()


def test_agent_that_dies_during_the_dump_is_restarted(quick: Host) -> None:
    one = Witness.start(quick, size=100)
    with dumping(one) as (cli, criu):
        os.kill(cli.pid, signal.SIGSTOP)  # the command cannot start one
        quick.kill_agent()
        until(lambda: [event for event in quick.events(one.session) if event["event"] == "fenced"], 15, "fenced")
        criu.resume()
        os.kill(cli.pid, signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 0, answer
    one.restore()


def test_command_killed_in_the_dump_and_criu_later(host: Host) -> None:
    """CRIU freezes the session again as it leaves, and who is to thaw it must not do so before."""
    one = Witness.start(host, size=100)
    with dumping(one) as (cli, criu):
        gone(cli)
        time.sleep(0.5)
        assert cgroup.is_traced(host.group(one.session)) and one.state in ("frozen", "checkpointing")
        criu.resume()
        one.assert_counts()
    one.assert_runs()
    host.cm_json("checkpoint", one.name)
    one.restore()


def test_criu_killed_after_the_lease_deadline(quick: Host) -> None:
    one = Witness.start(quick, size=100)
    group = quick.group(one.session)
    with dumping(one) as (cli, criu):
        with no_agent(quick, one):
            criu.kill()
            until(lambda: not cgroup.is_traced(group), 10, "CRIU is gone")
            counted = len(one.numbers())
            time.sleep(1)
            assert cgroup.is_frozen(group) and len(one.numbers()) == counted
        status, answer = finished(cli)
    assert (status, answer["error"]["code"]) == (8, "criu_failed"), answer
    assert one.assert_runs() >= counted


@pytest.mark.parametrize("stopped", [False, True])
def test_session_killed_in_the_dump_ends_criu(host: Host, stopped: bool) -> None:
    one = Witness.start(host, size=100)
    with dumping(one) as (cli, criu):
        if not stopped:
            os.kill(cli.pid, signal.SIGSTOP)  # CRIU's pages are not read: it waits
            criu.resume()
        host.cm_json("kill", one.name, "--signal", "KILL")
        until(lambda: not criu.is_running() or criu.status() == psutil.STATUS_ZOMBIE, 10, "CRIU is gone")
        os.kill(cli.pid, signal.SIGCONT)
        status, answer = finished(cli)
    assert (status, answer["error"]["code"]) == (4, "session_exited"), answer
    assert one.state == "exited"
    host.assert_clean(ended=True)


def test_session_taken_over_during_its_dump(quick: Host) -> None:
    """Its time ran out, another host has it: the copy here goes, and CRIU with it."""
    one = Witness.start(quick, size=100)
    with dumping(one) as (cli, criu):
        with no_agent(quick, one):
            quick.ok("lease", "break", one.session, "--yes")
        until(lambda: not criu.is_running() or criu.status() == psutil.STATUS_ZOMBIE, 20, "CRIU is gone")
        status, answer = finished(cli)
    assert status in (4, 5) and answer["error"], answer
    assert one.state == "exited" and not quick.pids(one.session)


@pytest.mark.parametrize("dies", [False, True])
def test_session_frozen_by_seize_stays_frozen_after_the_dump(host: Host, dies: bool) -> None:
    one = Witness.start(host, size=100)
    group = host.group(one.session)
    host.ok("turn", one.name, "seize", "--actor", "root", "--freeze")
    counted = len(one.numbers())
    with dumping(one, "--leave-running") as (cli, criu):
        (criu.kill if dies else criu.resume)()
        status, answer = finished(cli)
    assert (status == 0) is not dies, answer
    time.sleep(0.5)
    assert cgroup.is_frozen(group) and len(one.numbers()) <= counted + dies  # it may be in the middle of a step
    host.ok("turn", one.name, "release", "--actor", "root")
    one.assert_counts()
