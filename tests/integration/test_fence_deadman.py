"""The lease watchdog: without a renewal a session is frozen by its deadline, regardless of what else is dead."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate.clock import boottime
from tests.support import fenced_sessions
from tests.support.host import CM, Host, a_host, until
from tests.support.pty_client import Pty

LATE_MS = 1000.0  # generous: this machine may be busy. scripts/benchlib/fence.py measures


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Host]:
    with a_host(tmp_path, ttl="2s") as host:
        yield host


def test_session_freezes_at_its_deadline_without_an_agent_and_resumes_with_the_next(quick: Host) -> None:
    session = fenced_sessions.counter(quick)
    time.sleep(1)
    quick.kill_agent()
    fenced = fenced_sessions.wait_event(quick, session, "fenced", 5)
    assert 0 <= fenced["late_ms"] < LATE_MS
    stood = fenced_sessions.stands_still(quick, session)
    (row,) = quick.sessions()  # any command brings an agent
    assert row["state"] in ("fenced", "running")
    fenced_sessions.wait_event(quick, session, "unfenced", 10)
    assert fenced_sessions.counts_on(quick, session) >= stood
    assert quick.agent_pid() is not None


def test_agent_stopped_and_continued(quick: Host) -> None:
    session = fenced_sessions.counter(quick)
    agent = quick.agent_pid()
    assert agent is not None
    with fenced_sessions.halted(agent):
        assert fenced_sessions.wait_event(quick, session, "fenced", 5)["late_ms"] < LATE_MS
        fenced_sessions.stands_still(quick, session)
    fenced_sessions.wait_event(quick, session, "unfenced", 10)
    fenced_sessions.counts_on(quick, session)


def test_session_freezes_while_the_lease_store_is_away(quick: Host) -> None:
    quick.extra["CMDOP_MIGRATE_LEASE"] = f"sqlite://{quick.dir}/lease/lease.db"
    session = fenced_sessions.counter(quick)
    agent = quick.agent_pid()
    with fenced_sessions.away(quick.dir / "lease"):
        assert fenced_sessions.wait_event(quick, session, "fenced", 8)["late_ms"] < LATE_MS
        assert "lease" in fenced_sessions.wait_event(quick, session, "lease_unsure", 8)["reason"]
        fenced_sessions.stands_still(quick, session)
        assert quick.agent_pid() == agent  # it waits for the store; no command has to start it again
        quick.fails("run", "-d", "--", "true", status=6, code="lease_unreachable")
    fenced_sessions.wait_event(quick, session, "unfenced", 15)
    fenced_sessions.counts_on(quick, session)
    assert quick.agent_pid() == agent


def test_lease_store_that_lost_everything_stops_the_session_and_does_not_kill_it(quick: Host) -> None:
    """An empty directory where the store was, as when a mount is missing: no other host took over."""
    lease = quick.dir / "lease"
    quick.extra["CMDOP_MIGRATE_LEASE"] = f"sqlite://{lease}/lease.db"
    session = fenced_sessions.counter(quick)
    lease.rename(quick.dir / "lease.away")
    fenced_sessions.wait_event(quick, session, "fenced", 8)
    fenced_sessions.stands_still(quick, session)
    empty = quick.dir / "lease.empty"
    if lease.exists():
        lease.rename(empty)
    (quick.dir / "lease.away").rename(lease)
    fenced_sessions.wait_event(quick, session, "unfenced", 15)
    fenced_sessions.counts_on(quick, session)


def test_clients_learn_why_the_session_is_frozen(quick: Host) -> None:
    session = fenced_sessions.counter(quick)
    agent = quick.agent_pid()
    assert agent is not None
    with Pty([*quick.prefix, *ATTACH], quick.env()) as early:
        early.expect(b"n 5")
        with fenced_sessions.halted(agent):
            early.expect(b"frozen: its lease was not renewed in time", 10)
            assert quick.sessions()[0]["state"] == "fenced"
            with Pty([*quick.prefix, *ATTACH], quick.env()) as late:
                late.expect(b"frozen: its lease was not renewed in time", 10)
                quick.ok("send", session, "x")
        early.expect(b"resumed: its lease is renewed", 10)


ATTACH = [*CM, "attach", "w"]


def test_kill_of_a_fenced_session_does_not_thaw_it(quick: Host) -> None:
    """`kill` asks politely, which means letting it run: not one that another may have taken over."""
    session = quick.start(
        "bash", "-c", "trap 'echo says goodbye; exit' TERM HUP; while :; do echo n $((++i)); sleep 0.05; done", name="w"
    )["session"]
    until(lambda: "n 3" in quick.output("w"), 10, "it counts")
    agent = quick.agent_pid()
    assert agent is not None
    with fenced_sessions.halted(agent):
        fenced_sessions.wait_event(quick, session, "fenced", 8)
        quick.ok("kill", "w")
    assert "goodbye" not in quick.output("w")
    assert quick.sessions()[0]["state"] == "exited"


def test_a_hung_holder_does_not_freeze_other_sessions(quick: Host) -> None:
    stuck, fine = fenced_sessions.counter(quick, "stuck"), fenced_sessions.counter(quick, "fine")
    with fenced_sessions.halted(quick.holder(stuck)):
        time.sleep(5)
        fenced_sessions.counts_on(quick, fine)
        assert not [one for one in quick.events(fine) if one["event"] == "fenced"]
        metrics = (quick.run / "metrics.prom").read_text()
        assert "cmdop_migrate_sessions 2" in metrics
    fenced_sessions.counts_on(quick, stuck)


@pytest.mark.parametrize("which", ["the agent that knows it", "another, started meanwhile"])
def test_agent_freezes_the_session_of_a_stopped_holder_while_the_store_is_away(quick: Host, which: str) -> None:
    quick.extra["CMDOP_MIGRATE_LEASE"] = f"sqlite://{quick.dir}/lease/lease.db"
    session = fenced_sessions.counter(quick)
    time.sleep(1)  # the agent has renewed it
    with contextlib.ExitStack() as stack:
        with fenced_sessions.away(quick.dir / "lease"), fenced_sessions.halted(quick.holder(session)):
            began = boottime()
            if which != "the agent that knows it":
                quick.kill_agent()
                stack.enter_context(an_agent(quick))
            assert not fenced_sessions.is_frozen(quick, session)
            until(
                lambda: fenced_sessions.is_frozen(quick, session), 10, "it stands still, though its holder does nothing"
            )
            assert fenced_sessions.since(began) < 2.0 + LATE_MS / 1000  # its TTL
        fenced_sessions.wait_event(quick, session, "unfenced", 15)
        fenced_sessions.counts_on(quick, session)


@contextlib.contextmanager
def an_agent(host: Host) -> Iterator[None]:
    """One that is there to stay. By hand: no command is needed for it, which might wait for the store."""
    own = subprocess.Popen([*CM, "agent"], env=host.env(), stderr=subprocess.DEVNULL, cwd="/", start_new_session=True)
    try:
        yield
    finally:
        own.send_signal(signal.SIGTERM)
        own.wait(timeout=20)


def test_self_fence_delay_of_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with a_host(tmp_path, ttl="3s") as host:
        sessions = [host.start("sleep", "1000", options=("--net", "host"))["session"] for _ in range(12)]
        host.kill_agent()
        late = [fenced_sessions.wait_event(host, one, "fenced", 10)["late_ms"] for one in sessions]
        until(lambda: all(fenced_sessions.is_frozen(host, one) for one in sessions), 5, "all frozen")
    with capsys.disabled():
        print(
            f"\n  self-fence delay, {len(late)} sessions: p50 {fenced_sessions.percentile(late, 0.5):.2f} ms, "
            f"p99 {fenced_sessions.percentile(late, 0.99):.2f} ms"
        )
    assert max(late) < LATE_MS


def test_no_deadline_is_on_the_wall_clock() -> None:
    """Setting the clock back an hour changes nothing, because nothing of the fence asks it."""
    project = Path(__file__).resolve().parents[2] / "cmdop_migrate"
    files = [*project.glob("lease/*.py"), *(project / f"{name}.py" for name in FENCE)]
    asks = re.compile(r"walltime|time\.time\(|CLOCK_REALTIME|datetime|[^_]time\.time_ns")
    found = [path.name for path in files if asks.search(path.read_text())]
    assert len(files) > 8 and found == []


FENCE = (
    "agent/daemon",
    "agent/deadline_watchdog",
    "agent/holder_connections",
    "holder/lease_watchdog",
    "host/agent_process",
    "host/leases",
    "host/name_lease",
    "session/holder_deadlines",
)


def test_holder_that_hangs_in_a_write_still_freezes_its_session(tmp_path: Path) -> None:
    """The watchdog's second thread freezes the session: the main thread does not poll the timer here."""
    from cmdop_migrate.holder import cgroup
    from cmdop_migrate.holder.lease_watchdog import LeaseWatchdog

    mount = cgroup.mount_point()
    assert mount is not None
    group = f"{mount}/cmdop-migrate-test-{os.getpid()}"
    cgroup.create(group)
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(0.01)
    try:
        cgroup.join(group, child)
        changes: list[bool] = []
        switch = LeaseWatchdog(group, boottime() + 0.3, changes.append)
        switch.watch()
        assert not cgroup.is_frozen(group)
        until(lambda: cgroup.is_frozen(group), 3, "frozen by the guard")
        assert changes == []
        switch.renewed(boottime() + 60, boottime())  # the caller is back: what was done for it, it knows
        assert changes == [True, False] and not switch.fenced
        cgroup.thaw(group)
        switch.renewed(boottime() + 61, boottime())
        switch.doubt()
        assert switch.fenced and changes[-1] is True
        switch.renewed(boottime() + 60, boottime() - 1)  # asked before the doubt arose
        assert switch.fenced
        switch.renewed(boottime() + 60, boottime())
        assert not switch.fenced
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        cgroup.remove(group)
