"""A host that is cut off, or sleeps, while another takes its session over: never two that run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate.clock import boottime
from cmdop_migrate.host.resources import TEST_STOP
from tests.support import fenced_sessions
from tests.support.host import CM, Host, pair, until
from tests.support.stamping_session import Stamped, assert_superseded, told_all_the_time


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with pair(tmp_path) as both:
        yield both


@pytest.mark.parametrize("cut", ["agent", "agent and socket"])
def test_partition(hosts: tuple[Host, Host], tmp_path: Path, cut: str) -> None:
    a, b = hosts
    stamped = Stamped(a, tmp_path / "shared")
    session = stamped.session
    stamped.save(a)
    agent = a.agent_pid()
    assert agent is not None
    b.fails("restore", session, status=5, code="fenced")
    with fenced_sessions.halted(agent):
        with told_all_the_time(session, a, b):
            until(lambda: len(stamped.times("did", 1)) > 3, 10, "A does what it is told")
            if cut != "agent":
                (a.run / f"{session}.sock").rename(a.dir / "gone.sock")
            b.ok("restore", session, "--wait", "40s")
            until(lambda: len(stamped.times("did", 2)) > 20, 10, "B does what it is told")
        if cut == "agent":
            error = a.fails("checkpoint", "w", status=5, code="fenced")
            assert "host-b" in error["message"]
    stamped.restored_on(b)
    runs_from = fenced_sessions.event(b, session, "restored")["boottime"]
    assert fenced_sessions.event(a, session, "fenced")["boottime"] < runs_from
    for kind in ("ran", "did"):
        before, after = stamped.times(kind, 1), [one for one in stamped.times(kind, 2) if one >= runs_from]
        assert before and after and max(before) < runs_from
    if cut != "agent":
        (a.dir / "gone.sock").rename(a.run / f"{session}.sock")
    assert_superseded(a, session)
    last = len(stamped.times("ran", 1))
    time.sleep(0.3)
    assert len(stamped.times("ran", 1)) == last and b.sessions()[0]["state"] == "running"
    assert fenced_sessions.lease(a, session)["holder"] == fenced_sessions.lease(b, session)["holder"] == "host-b"


def test_partition_with_a_stopped_holder_and_another_agent(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """All that is left on A is an agent that never had the lease, and cannot ask for it."""
    a, b = hosts
    way = tmp_path / "way"
    (tmp_path / "lease").mkdir()
    way.symlink_to("lease")
    a.extra["CMDOP_MIGRATE_LEASE"] = f"sqlite://{way}/lease.db"
    stamped = Stamped(a, tmp_path / "shared")
    session = stamped.session
    stamped.save(a)
    holder = a.holder(session)
    way.unlink()
    way.write_text("cut")
    a.kill_agent()
    agent = subprocess.Popen([*CM, "agent"], env=a.env(), stderr=subprocess.DEVNULL, cwd="/", start_new_session=True)
    try:
        with fenced_sessions.halted(holder):
            b.ok("restore", session, "--wait", "40s")
            until(lambda: stamped.times("ran", 2), 10, "B runs")
            time.sleep(0.5)
            assert max(stamped.times("ran", 1)) < fenced_sessions.event(b, session, "restored")["boottime"]
        way.unlink()
        way.symlink_to("lease")
        assert_superseded(a, session)
    finally:
        agent.terminate()
        agent.wait(timeout=20)


@pytest.mark.parametrize("mode", ["park", "leave running"])
def test_late_commit_is_refused_by_the_store(hosts: tuple[Host, Host], tmp_path: Path, mode: str) -> None:
    """The checkpoint command was stopped, after all uploads and before the commit, while another host took over."""
    a, b = hosts
    stamped = Stamped(a, tmp_path / "shared")
    session = stamped.session
    first = stamped.save(a)
    agent = a.agent_pid()
    assert agent is not None
    options = ["--leave-running"] if mode != "park" else []
    late = subprocess.Popen(
        [*CM, "--json", "checkpoint", "w", *options],
        env=a.env(**{TEST_STOP: "checkpoint:commit"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        until(lambda: Path(f"/proc/{late.pid}/stat").read_text().split()[2] == "T", 20, "it stands at commit")
        with fenced_sessions.halted(agent):
            b.ok("restore", session, "--wait", "40s")
            os.kill(late.pid, signal.SIGCONT)
            out, _ = late.communicate(timeout=20)
            assert late.returncode == 5, out
            runs_from = fenced_sessions.event(b, session, "restored")["boottime"]
            assert max(stamped.times("ran", 1)) < runs_from
    finally:
        late.kill()
        late.communicate()
    assert_superseded(a, session)
    assert fenced_sessions.lease(b, session)["checkpoint"] == first
    assert fenced_sessions.lease(b, session)["holder"] == "host-b"


@pytest.mark.parametrize("order", ["session, holder, agent", "session, agent, holder"])
def test_a_machine_that_slept(
    hosts: tuple[Host, Host], tmp_path: Path, order: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything of A stops, wakes too late, and the session first."""
    a, b = hosts
    stamped = Stamped(a, tmp_path / "shared")
    session = stamped.session
    stamped.save(a)
    agent = a.agent_pid()
    assert agent is not None
    pids = {"agent": [agent], "holder": [a.holder(session)], "session": a.pids(session)}
    with fenced_sessions.halted(*(pid for part in pids.values() for pid in part)):
        b.ok("restore", session, "--wait", "40s")
        until(lambda: stamped.times("ran", 2), 10, "B runs")
        woken = boottime()
        for part in order.split(", "):
            for pid in pids[part]:
                os.kill(pid, signal.SIGCONT)
    assert_superseded(a, session)
    ran = [one - woken for one in stamped.times("ran", 1) if one >= woken]
    with capsys.disabled():
        window = f"{max(ran) * 1000:.2f} ms" if ran else "not at all"
        print(f"\n  woken in the order {order}: the session ran {window} before it was stopped")
    assert not ran or max(ran) < 1.0
    assert b.sessions()[0]["state"] == "running"
