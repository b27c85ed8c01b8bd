"""Each flow killed around the lease: the next command finds the session running here, parked, or running there."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate import config
from cmdop_migrate.criu.terminal import parent_death
from cmdop_migrate.errors import Unexpected
from cmdop_migrate.host import agent_process
from cmdop_migrate.host.host import Host as LocalHost
from cmdop_migrate.lease.store import Held
from cmdop_migrate.snapshot import restore, takeover
from cmdop_migrate.snapshot.restore_options import RestoreOptions
from tests.support import fenced_sessions
from tests.support.host import Host, pair, until
from tests.support.sampling import sampled


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with pair(tmp_path) as both:
        yield both


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Hosts whose leases outlive a test: no session freezes for want of an agent, and no agent steps in, on a busy
    machine too."""
    with pair(tmp_path, ttl="60s") as both:
        yield both


def assert_one(hosts: tuple[Host, Host], session: str, where: Host | None) -> None:
    """It has processes on that host and on no other; without one, on none, and its lease is parked."""
    assert [host for host in hosts if host.pids(session)] == ([where] if where else [])
    found = fenced_sessions.lease(where or hosts[0], session)
    assert (found["state"], found["holder"]) == (("held", where.name) if where else ("parked", None))


def test_run_killed_with_the_lease_taken(hosts: tuple[Host, Host]) -> None:
    a, _ = hosts
    fenced_sessions.kill_at(a, "leased", "run", "-d", "--name", "w", "--", "sleep", "100")
    assert a.sessions() == []
    a.assert_clean()
    a.start("sleep", "100", name="w")


def test_run_killed_when_it_had_started(hosts: tuple[Host, Host]) -> None:
    a, _ = hosts
    fenced_sessions.kill_at(a, "started", "run", "-d", "--name", "w", "--", "bash", "-c", fenced_sessions.COUNT)
    (row,) = a.sessions()
    assert row["state"] == "running"
    time.sleep(4)  # more than a TTL: the lease is being renewed
    fenced_sessions.counts_on(a, row["session"])
    assert_one(hosts, row["session"], a)


@pytest.mark.parametrize("step", sampled(["freeze", "upload", "publish", "commit", "committing"], 3, "checkpoint"))
def test_checkpoint_killed_before_the_commit(hosts: tuple[Host, Host], step: str) -> None:
    a, _ = hosts
    session = fenced_sessions.counter(a)
    fenced_sessions.kill_at(a, step, "checkpoint", "w")
    fenced_sessions.counts_on(a, session)
    assert_one(hosts, session, a)
    a.ok("checkpoint", "w")
    assert_one(hosts, session, None)


def test_checkpoint_killed_between_commit_and_park(patient: tuple[Host, Host]) -> None:
    """After the commit another host may restore it: it stays frozen here, though command and agent cannot end it."""
    a, b = patient
    session = fenced_sessions.counter(a)
    agent = a.agent_pid()
    assert agent is not None
    with fenced_sessions.halted(agent):  # or the agent would end it before we can look
        fenced_sessions.kill_at(a, "park", "checkpoint", "w")
        stood = fenced_sessions.stands_still(a, session)
        b.ok("restore", session)
        assert fenced_sessions.counts_on(b, session) >= stood
        assert fenced_sessions.stands_still(a, session) == stood
    until(lambda: fenced_sessions.record(a, session)["phase"] != "live", 10, "it ends at A")
    assert_one(patient, session, b)
    a.assert_clean(ended=True)


def test_checkpoint_killed_between_commit_and_park_and_no_other_host_restores(hosts: tuple[Host, Host]) -> None:
    a, _ = hosts
    session = fenced_sessions.counter(a)
    fenced_sessions.kill_at(a, "park", "checkpoint", "w")
    until(lambda: fenced_sessions.record(a, session)["phase"] == "parked", 10, "the agent finds it parked")
    assert_one(hosts, session, None)
    a.assert_clean(ended=True)
    a.ok("restore", "w")
    fenced_sessions.counts_on(a, session)
    assert_one(hosts, session, a)


@pytest.mark.parametrize("how", ["kill", "shutdown"])
def test_killed_or_shut_down_between_commit_and_park(patient: tuple[Host, Host], tmp_path: Path, how: str) -> None:
    """Another host may have it by then: here it ends without another step, not even to say goodbye."""
    a, b = patient
    (shared := tmp_path / "shared").mkdir()
    script = f"trap 'echo bye >> {shared}/said; exit' TERM; echo ready; while :; do sleep 0.05; done"
    session = a.start("bash", "-c", script, name="w", options=("--share", str(shared)))["session"]
    a.wait_for(session, "ready")
    agent = a.agent_pid()
    assert agent is not None
    with fenced_sessions.halted(agent), fenced_sessions.stopped_at(a, "park", "checkpoint", "w"):
        b.ok("restore", session)
        if how == "kill":
            a.ok("kill", "w")
        else:
            os.kill(a.holder(session), signal.SIGTERM)
        until(lambda: not a.pids(session), 10, "it ends at A")
        assert not (shared / "said").exists()
    assert_one(patient, session, b)


@pytest.mark.parametrize(
    ("left", "number"),
    sampled(itertools.product(["command", "agent", "nobody"], [signal.SIGTERM, signal.SIGKILL]), 3, "holder ended"),
)
def test_holder_ended_between_commit_and_park(hosts: tuple[Host, Host], left: str, number: int) -> None:
    """The holder could not know that its session is parked: the command, the agent or the next command looks up the
    lease."""
    a, _ = hosts
    session = fenced_sessions.counter(a)
    agent = a.agent_pid()
    assert agent is not None
    with fenced_sessions.halted(agent), fenced_sessions.stopped_at(a, "park", "checkpoint", "w") as (cli, standing):
        os.kill(a.holder(session), number)
        until(lambda: not a.holders(session), 10, "it ends at A")
        if left == "command":
            standing.resume()
            _, said = cli.communicate(timeout=20)
            assert cli.returncode == 0, said
            assert fenced_sessions.record(a, session)["phase"] == "parked"
        elif left == "nobody":
            os.kill(agent, signal.SIGKILL)
    if left == "agent":
        a.sessions()  # of one that was killed, this host hears by the next command
        until(lambda: fenced_sessions.record(a, session)["phase"] == "parked", 10, "the agent finds it parked")
    assert [one["state"] for one in a.sessions()] == ["parked"]
    assert_one(hosts, session, None)
    assert [one["name"] for one in a.cm_json("restore", "--all")["restored"]] == ["w"]
    fenced_sessions.counts_on(a, session)
    assert_one(hosts, session, a)


@pytest.mark.parametrize("left", ["everybody", "nobody"])
@pytest.mark.parametrize("step", ["committing", "park"])
def test_killed_by_a_person_while_it_is_parked(patient: tuple[Host, Host], step: str, left: str) -> None:
    """What was killed does not come back, parked or not; what is left of it is a copy."""
    a, b = patient
    session = fenced_sessions.counter(a)
    agent = a.agent_pid()
    assert agent is not None
    with contextlib.ExitStack() as stack:
        if left == "nobody":
            stack.enter_context(fenced_sessions.halted(agent))
        cli, standing = stack.enter_context(fenced_sessions.stopped_at(a, step, "checkpoint", "w"))
        assert a.cm_json("kill", "w")["exit"] == 137
        assert fenced_sessions.lease(a, session)["state"] == "free"
        standing.resume()
        out, _ = cli.communicate(timeout=30)
    error = json.loads(out)["error"]
    assert cli.returncode == (4 if step == "park" else 5) and "--fork" in error["hint"], error
    assert [one["note"] for one in a.sessions()] == ["killed"]
    for host in patient:
        host.fails("restore", session, status=5, code="fenced")
    assert a.cm_json("restore", "--all")["restored"] == []
    assert [one["state"] for one in b.cm_json("ls", "--all-hosts")["sessions"]] == []
    b.ok("restore", session_checkpoint(a), "--fork", "copy")
    assert not a.pids(session) and not b.pids(session)
    a.ok("kill", "w")
    assert a.sessions() == []


def session_checkpoint(host: Host) -> str:
    (one,) = host.cm_json("checkpoints", "ls")["checkpoints"]
    return str(one["checkpoint"])


@pytest.mark.parametrize("then", ["restore", "kill", "agent"])
def test_a_kill_that_was_cut_off_is_finished(patient: tuple[Host, Host], then: str) -> None:
    """The session has ended, its lease is not ended yet: the next command, or the agent, finishes the kill."""
    a, _ = patient
    session = fenced_sessions.counter(a)
    agent = a.agent_pid()
    assert agent is not None
    with fenced_sessions.halted(agent):
        with fenced_sessions.stopped_at(a, "park", "checkpoint", "w"):
            fenced_sessions.kill_at(a, "taken", "kill", "w")
            assert fenced_sessions.record(a, session)["exit"]["reason"].startswith("killed; ")
            assert fenced_sessions.lease(a, session)["state"] == "held"
        if then == "restore":
            assert "has ended" in a.fails("restore", "w", status=5, code="fenced")["message"]
        elif then == "kill":
            a.ok("kill", "w")
    until(lambda: fenced_sessions.lease(a, session)["state"] == "free", 10, "its lease is ended")
    if then != "kill":
        until(lambda: fenced_sessions.record(a, session)["exit"]["reason"] == "killed", 10, "and its record says so")
    a.fails("restore", session, status=5, code="fenced")


def test_kill_of_one_whose_holder_hangs_while_it_is_parked(patient: tuple[Host, Host]) -> None:
    """The holder is killed as well, and notes nothing: the wish is on record all the same."""
    a, _ = patient
    session = fenced_sessions.counter(a)
    with fenced_sessions.stopped_at(a, "park", "checkpoint", "w"):
        os.kill(a.holder(session), signal.SIGSTOP)
        assert a.cm_json("kill", "w")["exit"] == 137
    assert fenced_sessions.lease(a, session)["state"] == "free"
    assert [(one["state"], one["note"]) for one in a.sessions()] == [("exited", "killed")]
    a.fails("restore", "w", status=5, code="fenced")


def test_what_is_parked_is_not_forgotten_as_ended(patient: tuple[Host, Host]) -> None:
    """By its record it has ended. Who wants to be rid of that learns that it is parked; who says it again means it."""
    a, _ = patient
    session = fenced_sessions.counter(a)
    agent = a.agent_pid()
    assert agent is not None
    with fenced_sessions.halted(agent):
        with fenced_sessions.stopped_at(a, "park", "checkpoint", "w"):
            os.kill(a.holder(session), signal.SIGKILL)
            until(lambda: not a.holders(session), 10, "it ends")
        assert [one["state"] for one in a.sessions()] == ["exited"]  # the agent hears nothing
        done = a.cm("--json", "kill", "w")
        assert done.returncode == 4 and "parked" in json.loads(done.stdout)["error"]["message"], done
    assert [one["state"] for one in a.sessions()] == ["parked"]
    assert_one(patient, session, None)
    assert a.cm_json("kill", "w")["discarded"] is True
    a.fails("restore", session, status=5, code="fenced")


def test_holder_ended_after_the_checkpoint_command_was_killed_before_park(patient: tuple[Host, Host]) -> None:
    """The command is dead, too: the session was frozen until a process would look up its lease."""
    a, _ = patient
    session = fenced_sessions.counter(a)
    agent = a.agent_pid()
    assert agent is not None
    with fenced_sessions.halted(agent):
        fenced_sessions.kill_at(a, "park", "checkpoint", "w")
        fenced_sessions.stands_still(a, session)
        os.kill(a.holder(session), signal.SIGTERM)
        until(lambda: not a.holders(session), 10, "it ends")
    until(lambda: fenced_sessions.record(a, session)["phase"] == "parked", 10, "the agent finds it parked")
    assert_one(patient, session, None)


def test_holder_ended_before_the_commit(hosts: tuple[Host, Host]) -> None:
    """Then the session is not parked, and is not listed as parked."""
    a, _ = hosts
    session = fenced_sessions.counter(a)
    with fenced_sessions.stopped_at(a, "committing", "checkpoint", "w"):
        os.kill(a.holder(session), signal.SIGTERM)
        until(lambda: not a.holders(session), 10, "it ends")
    until(lambda: fenced_sessions.lease(a, session)["state"] == "free", 10, "its lease is let go of")
    until(lambda: a.sessions()[0]["note"] == "it ended before it was parked", 10, "it is known that it is not")
    assert a.sessions()[0]["state"] == "exited" and a.cm_json("restore", "--all")["restored"] == []


@pytest.mark.parametrize(
    ("step", "again"),
    sampled(itertools.product(["lease", "files", "pre-resume", "resumed"], ["here", "there"]), 4, "restore killed"),
)
def test_restore_killed(hosts: tuple[Host, Host], step: str, again: str) -> None:
    """The next restore succeeds: on the same host immediately, on another host when the lease has expired."""
    a, b = hosts
    session = fenced_sessions.counter(a)
    a.ok("checkpoint", "w")
    parked = len(fenced_sessions.numbers(a, session))
    fenced_sessions.kill_at(b, step, "restore", session)
    until(lambda: not b.pids(session), 10, "what was half restored is gone")
    host = b if again == "here" else a
    host.ok("restore", session, *(("--wait", "30s") if again == "there" else ()))
    assert fenced_sessions.counts_on(host, session) >= parked
    assert_one(hosts, session, host)
    b.sessions()
    if again == "there":
        b.assert_clean(ended=True)


def test_a_lease_is_given_back_when_nothing_runs_any_more(
    hosts: tuple[Host, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder is killed while its session runs, which does not end with it yet: the lease is released only after the
    last process of the session has ended, so that the next holder of the lease is alone."""
    a, _ = hosts
    session = a.start("bash", "-c", f"trap '' HUP; {fenced_sessions.COUNT}", name="w")["session"]
    until(lambda: fenced_sessions.numbers(a, session), 20, "it counts")
    a.ok("checkpoint", "w")
    ran, left = tmp_path / "ran", tmp_path / "left"
    give_back = takeover.TakeOver.give_back

    def kill_holder(*_: object) -> None:
        ran.write_text(str(len(a.pids(session))))
        os.kill(a.holder(session), signal.SIGKILL)

    def look(over: takeover.TakeOver, lease: Held) -> None:
        left.write_text(str(len(a.pids(session))))
        give_back(over, lease)

    monkeypatch.setattr(parent_death, "die_with_parent", kill_holder)
    monkeypatch.setattr(takeover.TakeOver, "give_back", look)
    for key, value in a.env().items():
        monkeypatch.setenv(key, value)
    with pytest.raises(Unexpected):
        restore.restore(LocalHost(config.load()), session, RestoreOptions())
    until(left.exists, 10, "the lease is given back")
    assert int(ran.read_text()) > 0 and left.read_text() == "0"
    until(lambda: not a.holders(session), 10)
    a.ok("restore", "w")
    fenced_sessions.counts_on(a, session)


def test_a_lease_is_given_back_when_no_agent_can_be_had(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = hosts
    session = fenced_sessions.counter(a)
    a.ok("checkpoint", "w")
    for key, value in a.env().items():
        monkeypatch.setenv(key, value)
    records = LocalHost(config.load())

    def none(*_: object) -> None:
        if records.is_held(session):  # it has begun
            raise Unexpected("the agent ended at once", "See its log.")

    monkeypatch.setattr(agent_process, "ensure", none)
    with pytest.raises(Unexpected):
        restore.restore(records, session, RestoreOptions())
    until(lambda: fenced_sessions.lease(a, session)["state"] == "parked", 10, "the lease is given back")
    b.ok("restore", session)
    fenced_sessions.counts_on(b, session)


@pytest.mark.parametrize("by", ["the time", "a person"])
def test_record_of_an_exited_session_is_kept_while_it_is_being_restored(hosts: tuple[Host, Host], by: str) -> None:
    """Its record says that it ended, until it runs."""
    a, _ = hosts
    session = fenced_sessions.counter(a)
    a.ok("checkpoint", "w", "--leave-running")
    os.kill(a.holder(session), signal.SIGKILL)
    until(lambda: [one["state"] for one in a.sessions()] == ["exited"], 10, "its end is on record")
    with fenced_sessions.stopped_at(a, "images", "restore", "w") as (cli, standing):
        if by == "the time":
            a.ok("ls", env={"CMDOP_MIGRATE_KEEP_EXITED": "1ms"})
        else:
            a.fails("kill", "w", status=5, code="fenced")
        standing.resume()
        _, said = cli.communicate(timeout=30)
    assert cli.returncode == 0, said
    fenced_sessions.counts_on(a, session)
    assert_one(hosts, session, a)


def test_parked_and_back_between_two_renewals(tmp_path: Path) -> None:
    """The agent knows the incarnation before: it must not take the new one for it."""
    with pair(tmp_path, ttl="15s") as (a, _):
        session, other = fenced_sessions.counter(a), fenced_sessions.counter(a, "other")
        time.sleep(1)
        for _ in range(3):
            a.ok("checkpoint", "w")
            a.ok("restore", "w")
        time.sleep(6)  # more than one renewal
        fenced_sessions.counts_on(a, session)
        fenced_sessions.counts_on(a, other)
        assert not [one for one in a.events() if one["event"] == "superseded"]
        assert fenced_sessions.lease(a, session)["token"] == 4
