"""At most once: who may restore what, and what they are told who may not."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fenced_sessions
from tests.support.host import CM, Host, pair, until
from tests.support.patience import bound
from tests.support.pty_client import Pty

ROUNDS = 6


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with pair(tmp_path) as both:
        yield both


def test_what_runs_or_was_restored_is_not_restored_again(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    session = fenced_sessions.counter(a)
    first = a.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    assert "host-a" in b.fails("restore", session, status=5, code="fenced")["message"]
    assert "host-a" in a.fails("restore", "w", status=5, code="fenced")["message"]
    a.ok("checkpoint", "w")
    moved = b.cm_json("restore", session)
    assert moved["token"] == 2
    assert "host-b" in a.fails("restore", "w", status=5, code="fenced")["message"]
    error = a.fails("restore", first, status=5, code="fenced")
    assert "has a newer checkpoint" in error["message"] and "--fork" in error["hint"]
    copy = a.cm_json("restore", first, "--fork", "copy")
    assert copy["parent"] == session and copy["token"] == 1
    fenced_sessions.counts_on(a, copy["session"])
    fenced_sessions.counts_on(b, session)


def test_the_token_can_be_read_inside_and_grows(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    command = "while read -r line; do echo token $(cat /run/cmdop-migrate/token); done"
    session = a.start("bash", "-c", command, name="w")["session"]
    for token, (host, other) in enumerate([(a, b), (b, a), (a, b)], 1):
        host.ok("send", session, "x", "--enter")
        host.wait_for(session, f"token {token}")
        host.ok("checkpoint", session)
        assert other.cm_json("restore", session)["token"] == token + 1


def test_two_hosts_want_one_parked_session_at_the_same_moment(hosts: tuple[Host, Host]) -> None:
    session = fenced_sessions.counter(hosts[0])
    hosts[0].ok("checkpoint", "w")
    wins = {"host-a": 0, "host-b": 0}
    for number in range(ROUNDS):
        tries = [
            subprocess.Popen(
                [*CM, "--json", "restore", session],
                env=host.env(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            for host in hosts
        ]
        answers = [(one.communicate(timeout=60)[0], one.returncode) for one in tries]
        assert sorted(code for _, code in answers) == [0, 5], answers
        (won,) = [json.loads(out) for out, code in answers if code == 0]
        assert won["token"] == number + 2
        (winner,) = [host for host in hosts if host.name == won["host"]]
        wins[winner.name] += 1
        assert [host for host in hosts if host.pids(session)] == [winner]
        fenced_sessions.counts_on(winner, session)
        winner.ok("checkpoint", session)
    assert sum(wins.values()) == ROUNDS


def test_a_dead_hosts_session(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    session = fenced_sessions.counter(a)
    a.ok("checkpoint", "w", "--leave-running")
    saved = len(fenced_sessions.numbers(a, session))
    fenced_sessions.die(a, session)
    began = time.monotonic()
    error = b.fails("restore", session, status=5, code="fenced")
    assert "--wait" in error["hint"] and time.monotonic() - began < bound(10)
    with Pty([*CM, "restore", session, "--wait", "60s"], b.env()) as person:
        person.expect(b"host-a holds it; waiting ", 20)
        person.expect(b"running on host-b (token 2)", 30)
        assert person.wait() == 0
    assert fenced_sessions.counts_on(b, session) >= saved - 5
    shutil.rmtree(a.run)  # A boots again
    (row,) = a.sessions()
    assert row["state"] == "exited" and "holder died" in row["note"]
    assert "host-b" in a.fails("restore", "w", status=5, code="fenced")["message"]
    assert not a.pids(session)


def test_a_session_whose_holder_died_comes_back_at_once(hosts: tuple[Host, Host]) -> None:
    """The agent lives and releases the lease of the dead holder: a restore need not wait until the lease expires."""
    a, b = hosts
    session = fenced_sessions.counter(a)
    a.ok("checkpoint", "w", "--leave-running")
    os.kill(a.holder(session), 9)
    until(lambda: not a.pids(session), 10, "it dies with its holder")
    a.sessions()
    until(lambda: fenced_sessions.lease(a, session)["state"] == "free", 10, "the agent lets go")
    b.ok("restore", session)
    fenced_sessions.counts_on(b, session)


def test_one_name_two_hosts(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b):
        b.name = "host-a"
        session = fenced_sessions.counter(a)
        error = b.fails("run", "-d", "--", "true", status=5, code="fenced")
        assert "host-a" in error["message"] and "host" in error["hint"]
        assert b.session_dirs() == [] and b.agent_pid() is None
        fenced_sessions.counts_on(a, session)
        fenced_sessions.die(a, session)
        b.start("sleep", "100")  # a dead one's name is free again after its TTL
        a.sessions()
        a.fails("run", "-d", "--", "true", status=5, code="fenced")


def test_no_lease_store_no_session(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, _):
        (tmp_path / "lease").write_text("not a directory")
        a.fails("run", "-d", "--name", "w", "--", "true", status=6, code="lease_unreachable")
        assert a.session_dirs() == [] and a.agent_pid() is None
        a.assert_clean()
        (tmp_path / "lease").unlink()


def put(directory: Path, session: str, data: bytes) -> None:
    with sqlite3.connect(directory / "lease" / "lease.db") as db:
        db.execute("UPDATE lease SET data = ?, version = version + 1 WHERE session = ?", (data, session))
    db.close()


def get(directory: Path, session: str) -> bytes:
    with sqlite3.connect(directory / "lease" / "lease.db") as db:
        ((data,),) = db.execute("SELECT data FROM lease WHERE session = ?", (session,)).fetchall()
    db.close()
    return bytes(data)


@pytest.mark.parametrize("kind", ["garbage", "newer"])
def test_a_lease_that_cannot_be_read(hosts: tuple[Host, Host], tmp_path: Path, kind: str) -> None:
    a, b = hosts
    session, other = fenced_sessions.counter(a), fenced_sessions.counter(a, "other")
    checkpoint = a.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    before = get(tmp_path, session)
    newer = json.dumps({**json.loads(before), "version": 99, "more": 1}).encode()
    code = "lease_newer" if kind == "newer" else "lease_unreadable"
    put(tmp_path, session, newer if kind == "newer" else b"\x00garbage")
    fenced_sessions.wait_event(a, session, "fenced", 10)
    assert "lease" in fenced_sessions.event(a, session, "lease_unsure")["reason"]
    fenced_sessions.counts_on(a, other)
    for command in (["lease", "show", session], ["restore", session, "--wait", "10s"]):
        b.fails(*command, status=6, code=code)
    b.fails("checkpoints", "prune", "--keep-last", "1", status=6, code=code)
    b.fails("lease", "break", session, status=6 if kind == "newer" else 2, code=code if kind == "newer" else "usage")
    if kind == "newer":
        put(tmp_path, session, before)
        fenced_sessions.wait_event(a, session, "unfenced", 10)
        fenced_sessions.counts_on(a, session)
        return
    broken = b.cm_json("lease", "break", session, "--yes")
    assert broken["state"] == "parked" and broken["token"] > 1
    until(lambda: fenced_sessions.record(a, session)["phase"] == "exited", 10, "A learns of it")
    assert b.cm_json("restore", session)["checkpoint"] == checkpoint
    fenced_sessions.counts_on(b, session)


def test_lease_show_and_break(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    session = fenced_sessions.counter(a)
    checkpoint = a.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    shown = b.cm_json("lease", "show", "w")  # by the name it has in the store
    assert (shown["holder"], shown["token"], shown["ttl_s"], shown["state"]) == ("host-a", 1, 3.0, "held")
    assert shown["checkpoint"] == checkpoint
    assert "held by host-a, token 1" in b.ok("lease", "show", session)
    a.fails("lease", "show", "nobody", status=3, code="session_not_found")
    b.fails("lease", "break", session, status=2, code="usage")
    with Pty([*CM, "lease", "break", session], b.env()) as person:
        person.expect(b"two copies will run")
        person.type("n\r")
        assert person.wait() != 0
    assert fenced_sessions.lease(b, session)["holder"] == "host-a"
    broken = b.cm_json("lease", "break", session, "--yes")
    assert broken == {"holder": None, "token": 2, "ttl_s": 0, "state": "parked"}
    until(lambda: fenced_sessions.record(a, session)["phase"] == "exited", 10, "A learns of it")
    assert "superseded" in fenced_sessions.record(a, session)["exit"]["reason"]
    assert b.cm_json("restore", session)["token"] == 3
    fenced_sessions.counts_on(b, session)


def test_what_was_taken_over_ends_though_nothing_can_be_written_down(hosts: tuple[Host, Host]) -> None:
    """A disk that is full keeps no agent from its work: here, no event can be written."""
    a, b = hosts
    session, other = fenced_sessions.counter(a), fenced_sessions.counter(a, "other")
    a.ok("checkpoint", "w", "--leave-running")
    events = a.state / "events.jsonl"
    events.unlink()
    events.mkdir()
    try:
        b.ok("lease", "break", session, "--yes")
        until(lambda: not a.pids(session), 10, "it ends at A")
    finally:
        events.rmdir()
    until(lambda: fenced_sessions.record(a, session)["phase"] == "exited", 10)
    assert "superseded" in fenced_sessions.record(a, session)["exit"]["reason"]
    fenced_sessions.counts_on(a, other)


def test_prune_on_a_host_that_was_superseded(hosts: tuple[Host, Host]) -> None:
    """It remembers the session as ended; the one who runs it may need its checkpoint."""
    a, b = hosts
    session = fenced_sessions.counter(a)
    a.ok("checkpoint", "w", "--leave-running")
    b.ok("lease", "break", session, "--yes")
    until(lambda: fenced_sessions.record(a, session)["phase"] == "exited", 10, "A learns of it")
    first = b.cm_json("restore", session)["checkpoint"]
    kept = a.cm_json("checkpoints", "prune", "--keep-within", "0s")
    assert kept["checkpoints"] == []
    error = a.fails("checkpoints", "prune", "--drop", first, "--keep-last", "9", status=5, code="fenced")
    assert "host-b" in error["message"]
    last = b.cm_json("checkpoint", session)["checkpoint"]
    gone = a.cm_json("checkpoints", "prune", "--keep-within", "0s")
    assert gone["checkpoints"] == [first]
    a.cm_json("checkpoints", "verify", last)
    b.ok("restore", session)
    fenced_sessions.counts_on(b, session)


def test_all_hosts_are_listed_as_their_leases_tell(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    session = fenced_sessions.counter(a)
    other = b.start("sleep", "1000", name="u")["session"]

    def listed(host: Host) -> dict[str, tuple[str, str, int]]:
        rows = host.cm_json("ls", "--all-hosts")["sessions"]
        return {row["session"]: (row["host"], row["state"], row["token"]) for row in rows}

    assert listed(a) == listed(b) == {session: ("host-a", "running", 1), other: ("host-b", "running", 1)}
    a.ok("checkpoint", "w")
    assert listed(b)[session] == ("host-a", "parked", 1)
    b.ok("restore", session)
    assert listed(a) == listed(b) == {session: ("host-b", "running", 2), other: ("host-b", "running", 1)}
