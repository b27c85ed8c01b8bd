"""kill of a session that exists only in the store: no host restores it any more."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fenced_sessions
from tests.support.host import CM, Host, pair


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with pair(tmp_path) as both:
        yield both


def test_kill_discards_a_session_parked_here(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    session = fenced_sessions.counter(a)
    checkpoint = a.cm_json("checkpoint", "w")["checkpoint"]
    done = a.cm_json("kill", "w")
    assert done.items() >= {"session": session, "discarded": True, "checkpoint": checkpoint, "exit": None}.items()
    assert a.sessions() == [] and a.session_dirs() == []
    assert fenced_sessions.event(a, session, "discarded")["checkpoint"] == checkpoint
    assert (
        fenced_sessions.lease(b, session)["state"] == "free" and fenced_sessions.lease(b, session)["checkpoint"] is None
    )
    assert "has ended" in a.fails("restore", session, status=5, code="fenced")["message"]
    assert "--fork" in b.fails("restore", checkpoint, status=5, code="fenced")["hint"]
    copy = b.cm_json("restore", checkpoint, "--fork", "copy")["session"]
    fenced_sessions.counts_on(b, copy)
    b.ok("kill", "copy", "--signal", "KILL")
    again = a.cm_json("kill", session)
    assert again["discarded"] and again["checkpoint"] is None, "a second time nothing is left to do"
    assert a.session_dirs() == []
    pruned = a.cm_json("checkpoints", "prune", "--keep-within", "0.001s")["checkpoints"]
    assert [one for one in pruned if not one.endswith(copy)] == [checkpoint], "but for what the copy was born with"
    a.fails("kill", session, status=3, code="session_not_found")


def test_kill_discards_a_session_parked_by_another_host(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    session = fenced_sessions.counter(a)
    a.ok("checkpoint", "w")
    b.fails("kill", session[:3], status=3, code="session_not_found")
    b.fails("kill", "nobody", status=3, code="session_not_found")
    assert "was parked; discarded" in b.ok("kill", "w")
    assert b.session_dirs() == []
    a.fails("restore", "w", status=5, code="fenced")
    assert a.cm_json("kill", "w")["discarded"], "its old host only forgets it"
    assert a.sessions() == []


def test_kill_refuses_a_session_that_another_host_runs(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    session = fenced_sessions.counter(a)
    a.ok("checkpoint", "w")
    b.ok("restore", session)
    error = a.fails("kill", "w", status=5, code="fenced")
    assert "host-b" in error["message"] and "Kill it there" in error["hint"]
    fenced_sessions.counts_on(b, session)
    other = fenced_sessions.counter(a, "other")
    a.ok("checkpoint", "other", "--leave-running")
    b.fails("kill", "other", status=5, code="fenced")
    fenced_sessions.counts_on(a, other)
    assert b.session_dirs() == [session]


def test_interrupted_kill_of_a_parked_session_is_finished_by_the_next(hosts: tuple[Host, Host]) -> None:
    """The first kill acquired the lease and did not end it: the next kill, or a restore, continues from there."""
    a, b = hosts
    session = fenced_sessions.counter(a)
    a.ok("checkpoint", "w")
    fenced_sessions.kill_at(a, "taken", "kill", "w")
    assert fenced_sessions.lease(a, session)["holder"] == "host-a"
    assert fenced_sessions.record(a, session)["phase"] == "parked"
    b.fails("restore", session, status=5, code="fenced")
    a.ok("restore", "w")
    fenced_sessions.counts_on(a, session)
    a.ok("checkpoint", "w")
    fenced_sessions.kill_at(a, "taken", "kill", "w")
    assert a.cm_json("kill", "w")["discarded"]
    assert fenced_sessions.lease(a, session)["state"] == "free" and a.sessions() == []
    assert "has ended" in b.fails("restore", session, status=5, code="fenced")["message"]


def test_simultaneous_kill_and_restore_of_a_parked_session(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    session = fenced_sessions.counter(a)
    a.ok("checkpoint", "w")
    tries = [
        subprocess.Popen([*CM, "--json", *args], env=host.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for host, args in ((b, ("restore", session)), (a, ("kill", "w")))
    ]
    restored, discarded = [(one.communicate(timeout=60), one.returncode)[1] for one in tries]
    assert sorted((restored, discarded)) == [0, 5], (restored, discarded)
    assert bool(b.pids(session)) == (restored == 0)
