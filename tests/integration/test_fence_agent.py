"""The agent: one a host, restartable at any moment, and small."""

from __future__ import annotations

import configparser
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fenced_sessions
from tests.support.host import CM, PROJECT, Host, a_host, until

MANY = 100


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Host]:
    with a_host(tmp_path, ttl="3s") as host:
        yield host


def test_one_agent_per_host_exits_cleanly_and_its_successor_takes_over(quick: Host) -> None:
    session = fenced_sessions.counter(quick)
    first = quick.agent_pid()
    assert first is not None
    quick.fails("agent", status=4, code="blocked")
    quick.kill_agent(signal.SIGTERM)
    assert not (quick.run / "metrics.prom").exists()
    fenced_sessions.counts_on(quick, session)  # it did not touch it
    own = subprocess.Popen([*CM, "agent"], env=quick.env(), cwd="/", start_new_session=True)
    try:
        until(lambda: quick.agent_pid() == own.pid, 10, "the agent by hand")
        time.sleep(4)
        fenced_sessions.counts_on(quick, session)
        assert quick.agent_pid() == own.pid
        quick.ok("kill", "w")
        time.sleep(2)
        assert own.poll() is None  # not started on demand: it stays
        own.send_signal(signal.SIGTERM)
        assert own.wait(timeout=10) == 0
    finally:
        own.kill()
        own.wait()


def test_agent_on_demand_exits_when_no_session_is_left(quick: Host) -> None:
    session = quick.start("sleep", "1000")["session"]
    assert quick.agent_pid() is not None
    quick.ok("kill", session)
    until(lambda: quick.agent_pid() is None, 15, "it leaves")
    assert fenced_sessions.lease(quick, session)["state"] == "free"
    assert not (quick.run / "metrics.prom").exists()


def test_simultaneous_runs_on_a_host_without_an_agent(quick: Host) -> None:
    """All of the runs find no agent; one agent is started; no run is refused because of it."""
    for _ in range(2):
        tries = [
            subprocess.Popen(
                [*CM, "--json", "run", "-d", "--net", "host", "--", "sleep", "1000"],
                env=quick.env(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
            )
            for _ in range(4)
        ]
        done = [(one.communicate(timeout=60), one.returncode) for one in tries]
        assert [code for _, code in done] == [0] * 4, done
        assert quick.agent_pid() is not None
        for row in quick.sessions():
            quick.ok("kill", row["session"])


def test_run_while_the_agent_exits(quick: Host) -> None:
    """Over and over just when it leaves: every session has an agent in the end."""
    for number in range(6):
        session = quick.start("sleep", "1000", options=("--net", "host"))["session"]
        until(lambda: quick.agent_pid() is not None, 5, "an agent")
        quick.ok("kill", session)
        time.sleep(0.08 * number)
    session = quick.start("sleep", "1000", options=("--net", "host"))["session"]
    time.sleep(4)
    assert not fenced_sessions.is_frozen(quick, session) and quick.agent_pid() is not None


def test_agent_writes_metrics(quick: Host) -> None:
    fenced_sessions.counter(quick)
    wanted = re.compile(r"^cmdop_migrate_renewals_total [3-9]", re.M)
    until(lambda: wanted.search((quick.run / "metrics.prom").read_text()), 15, "renewals are counted")
    text = (quick.run / "metrics.prom").read_text()
    figures = dict(re.findall(r"^cmdop_migrate_(\w+) (\S+)$", text, re.M))
    assert figures["sessions"] == "1" and figures["host_name_held"] == "1" and figures["superseded_total"] == "0"
    assert float(figures["renew_seconds"]) < 3
    assert all(f"# TYPE cmdop_migrate_{name} " in text for name in figures)


def test_unreadable_record_of_a_live_session(quick: Host) -> None:
    """The agent knows what it was; above all it does not give its lease away."""
    session = fenced_sessions.counter(quick)
    path = quick.state / "sessions" / session / "session.json"
    good = path.read_bytes()
    time.sleep(2)  # the agent looks several times a second: by now it knows it
    path.write_bytes(b"{")
    time.sleep(5)
    assert not fenced_sessions.is_frozen(quick, session)
    path.write_bytes(good)
    assert fenced_sessions.lease(quick, session)["holder"] == quick.name
    fenced_sessions.counts_on(quick, session)


def test_stray_file_in_the_sessions_directory(quick: Host) -> None:
    session = fenced_sessions.counter(quick)
    stray = quick.state / "sessions" / "stray"
    stray.write_text("x")
    try:
        time.sleep(4)
        fenced_sessions.counts_on(quick, session)
        assert quick.sessions()[0]["state"] == "running"
    finally:
        stray.unlink()


def test_agent_renews_a_hundred_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Renewed in one loop, in time, by an agent that stays small. Only the leases are real here: see `leased`."""
    from cmdop_migrate import clock
    from cmdop_migrate.agent.daemon import Agent
    from cmdop_migrate.host.agent_process import Lock
    from cmdop_migrate.host.leases import open_store, take_new
    from cmdop_migrate.model import Record, Spec, new_session_id

    with a_host(tmp_path, ttl="3s") as host:
        host.sessions()
        records = fenced_sessions.records(host)
        store = open_store(records.config)
        spec = Spec(("true",), "/", "root", ())
        for number in range(MANY):
            session = new_session_id()
            lease = take_new(store, records, session)
            records.directory(session).mkdir()
            records.save(Record(session, f"s{number}", host.name, lease.token, "live", spec, clock.walltime()))
        lock = Lock.take(records.config)
        assert lock is not None
        agent = Agent(records, store, lock, until_idle=False)
        agent.step()
        took = []
        for _ in range(5):
            began = time.monotonic()
            agent.step()
            took.append(time.monotonic() - began)
        lock.release()
        assert len(agent.held) == MANY
        oldest = min(one.fresh_until for one in agent.held.values()) - clock.boottime()
        for session in records.ids():
            records.forget(session)
        (host.run / "metrics.prom").unlink()
    with capsys.disabled():
        print(f"\n  a round of {MANY} renewals, sqlite: {fenced_sessions.percentile(took, 0.5) * 1000:.1f} ms")
    assert max(took) < 1.0 and oldest > 0


def test_agent_memory(quick: Host, capsys: pytest.CaptureFixture[str]) -> None:
    fenced_sessions.counter(quick)
    pid = quick.agent_pid()
    time.sleep(3)
    rss = int(re.findall(r"^VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[0]) / 1024
    with capsys.disabled():
        print(f"\n  agent: {rss:.1f} MiB resident, {len(os.listdir(f'/proc/{pid}/fd'))} descriptors")
    assert rss < 80


def test_systemd_unit_of_the_agent() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # keys keep their case: the documented way
    unit.read(PROJECT / "scripts" / "systemd" / "cmdop-migrate-agent.service")
    service = unit["Service"]
    assert service["KillMode"] == "process" and service["Restart"] == "always"
    assert service["ExecStart"].endswith("cmdop-migrate agent")
    assert unit["Install"]["WantedBy"] == "multi-user.target"
