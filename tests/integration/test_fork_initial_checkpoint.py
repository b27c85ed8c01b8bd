"""A fork that has no checkpoint of its own yet: restored by any host, safe from prune, and removed if it never ran."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.witness import finished, gone, stopped
from tests.support import fenced_sessions
from tests.support.host import Host, pair, until

ALL = ("checkpoints", "prune", "--keep-within", "0s")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with pair(tmp_path) as both:
        yield both


def objects(tmp_path: Path, folder: str) -> list[Path]:
    return [path for path in (tmp_path / "store" / folder).rglob("*") if path.is_file()]


def births(tmp_path: Path) -> list[Path]:
    return [path for path in objects(tmp_path, "manifests") if path.name.endswith(path.parent.name)]


def branch_of(host: Host, *others: str) -> str:
    (found,) = set(host.session_dirs()) - set(others)
    return found


def pruned(host: Host, *options: str) -> list[str]:
    found: list[str] = host.cm_json(*(options or ALL))["checkpoints"]
    return found


def end(host: Host, session: str) -> None:
    host.ok("kill", session, "--signal", "KILL")
    until(lambda: fenced_sessions.lease(host, session)["state"] == "free", 10, "its agent lets go of it")


@pytest.mark.parametrize("by", ["name", "id"])
def test_fork_of_a_dead_host_is_restored_on_another(hosts: tuple[Host, Host], tmp_path: Path, by: str) -> None:
    """Also when its parent has ended, and all of the parent's checkpoints were pruned."""
    a, b = hosts
    session = fenced_sessions.counter(a)
    a.ok("turn", "w", "request", "--actor", "ann")
    made = a.cm_json("fork", "w", "branch")
    branch = made["session"]
    rows = {row["session"]: row["name"] for row in b.cm_json("ls", "--all-hosts")["sessions"]}
    assert rows[branch] == "branch", "not its parent's name"
    end(a, session)
    assert made["checkpoint"] in pruned(b)
    b.ok("checkpoints", "verify")
    fenced_sessions.die(a, branch)
    reference = {"name": "branch", "id": branch}[by]
    assert "host-a" in b.fails("restore", reference, status=5, code="fenced")["message"]
    back = b.cm_json("restore", reference, "--wait", "60s")
    assert (back["session"], back["name"], back["parent"]) == (branch, "branch", session) and back["token"] == 2
    fenced_sessions.counts_on(b, branch)
    assert b.cm_json("show", branch)["turn"] is None, "its parent's turn is not its own"
    own = b.cm_json("checkpoint", branch, "--leave-running")
    assert own["chunks"]["shared"] > own["chunks"]["new"]
    assert pruned(a, "checkpoints", "prune", "--keep-last", "9") == [back["checkpoint"]], "it has one of its own now"
    b.ok("checkpoints", "verify")


def test_parent_checkpoint_pruned_between_fetch_and_lease(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    a, b = hosts
    session = fenced_sessions.counter(a)
    first = a.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    a.ok("checkpoint", "w", "--leave-running")
    with stopped(a, "lease", "restore", first, "--fork", "branch") as (cli, worker):
        branch = branch_of(a, session)
        assert pruned(b, "checkpoints", "prune", "--keep-last", "1") == [first]
        worker.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert (status, answer["error"]["code"]) == (3, "checkpoint_not_found"), answer
    assert a.session_dirs() == [session] and fenced_sessions.lease(a, branch)["state"] == "free"
    assert not births(tmp_path) and not objects(tmp_path, "uploads")
    b.ok("checkpoints", "verify")
    fenced_sessions.counts_on(a, session)


def test_parent_checkpoint_pruned_after_the_initial_checkpoint(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Its lease stands at nothing yet: what it is to stand at stays, and all its chunks with it."""
    a, b = hosts
    session = fenced_sessions.counter(a)
    first = a.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    a.ok("checkpoint", "w", "--leave-running")
    with stopped(a, "initial", "restore", first, "--fork", "branch") as (cli, worker):
        assert pruned(b) == [first]
        assert pruned(a) == []
        worker.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 0, answer
    branch = answer["session"]
    fenced_sessions.counts_on(a, branch)
    assert pruned(b) == pruned(a) == []
    os.kill(a.holder(branch), 9)
    until(lambda: not a.pids(branch), 10, "it dies with its holder")
    a.sessions()
    until(lambda: fenced_sessions.lease(a, branch)["state"] == "free", 10, "the agent lets go")
    assert pruned(b) == pruned(a) == []
    assert b.cm_json("restore", "branch")["session"] == branch
    fenced_sessions.counts_on(b, branch)
    fenced_sessions.counts_on(a, session)


@pytest.mark.parametrize("step", ["initial", "files", "pre-resume", "resumed"])
def test_fork_killed_before_it_ran_leaves_nothing(hosts: tuple[Host, Host], tmp_path: Path, step: str) -> None:
    a, b = hosts
    session = fenced_sessions.counter(a)
    saved = a.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    with stopped(a, step, "restore", saved, "--fork", "branch") as (cli, worker):
        branch = branch_of(a, session)
        gone(worker)
        finished(cli)
    until(lambda: [row["name"] for row in a.sessions()] == ["w"], 10, "it is forgotten")
    (birth,) = births(tmp_path)
    assert pruned(b) == [], "another host cannot know that it is dead"
    assert pruned(a, *ALL, "--dry-run") == [birth.name]
    assert fenced_sessions.lease(a, branch)["state"] == "held", "a dry run changes nothing"
    assert pruned(a) == [birth.name]
    assert fenced_sessions.lease(a, branch)["state"] == "free"
    end(a, session)
    assert pruned(b) == [saved]
    assert not objects(tmp_path, "packs"), "no checkpoint needs these"


def test_fork_whose_host_died_before_it_ran_is_pruned(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """What it began with is a day old, and it has not run: any host's prune ends it."""
    a, b = hosts
    session = fenced_sessions.counter(a)
    saved = a.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    with stopped(a, "files", "restore", saved, "--fork", "branch") as (cli, worker):
        gone(worker)
        finished(cli)
    (birth,) = births(tmp_path)
    old(birth, tmp_path, hours=23)
    assert pruned(b) == []
    old(birth, tmp_path, hours=25)
    assert pruned(b) == [birth.name]
    error = b.fails("restore", birth.parent.name, status=3, code="session_not_found")
    assert error["hint"]
    fenced_sessions.counts_on(a, session)


def old(birth: Path, tmp_path: Path, hours: float) -> None:
    newest = max(path.stat().st_mtime for path in objects(tmp_path, "manifests"))
    os.utime(birth, (newest - hours * 3600, newest - hours * 3600))


@pytest.mark.parametrize("aged", [False, True])
def test_prune_during_a_fork(hosts: tuple[Host, Host], tmp_path: Path, aged: bool) -> None:
    """It runs, and has what it began with; or, taken for dead after a day, it does not run at all."""
    a, b = hosts
    session = fenced_sessions.counter(a)
    saved = a.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    with stopped(a, "pre-resume", "restore", saved, "--fork", "branch") as (cli, worker):
        branch = branch_of(a, session)
        (birth,) = births(tmp_path)
        if aged:
            old(birth, tmp_path, hours=25)
        assert pruned(a) == [], "it lives, as its lock says"
        assert pruned(b) == ([birth.name] if aged else [])
        worker.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    if aged:
        assert (status, answer["error"]["code"]) == (5, "fenced"), answer
        assert not a.pids(branch) and a.session_dirs() == [session]
        return
    assert status == 0, answer
    fenced_sessions.counts_on(a, branch)
    assert births(tmp_path) == [birth]
    old(birth, tmp_path, hours=25)
    assert pruned(a) == pruned(b) == [], "it runs"
    fenced_sessions.counts_on(a, branch)
    end(a, branch)
    assert pruned(b, "checkpoints", "prune", "--keep-last", "9") == [birth.name], "it has ended"


def test_fork_taken_over_before_it_ran_belongs_to_the_other_host(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """A restore that takes longer than its lease, and a person elsewhere who thinks it dead."""
    a, b = hosts
    session = fenced_sessions.counter(a)
    saved = a.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    with stopped(a, "pre-resume", "restore", saved, "--fork", "branch") as (cli, worker):
        branch = branch_of(a, session)
        assert b.cm_json("restore", "branch", "--wait", "30s")["session"] == branch
        worker.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert (status, answer["error"]["code"]) == (5, "fenced"), answer
    assert not a.pids(branch) and births(tmp_path)
    fenced_sessions.counts_on(b, branch)
    assert pruned(a) == pruned(b) == []
    b.ok("checkpoints", "verify")


def test_failed_fork_leaves_nothing(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    a, _ = hosts
    session = fenced_sessions.counter(a)
    saved = a.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    with stopped(a, "restore", "restore", saved, "--fork", "branch") as (cli, worker):
        branch = branch_of(a, session)
        gone_holder(a, branch)
        worker.send_signal(signal.SIGCONT)
        status, _ = finished(cli)
    assert status in (1, 8)
    assert not births(tmp_path) and fenced_sessions.lease(a, branch)["state"] == "free"
    fenced_sessions.counts_on(a, session)


def gone_holder(host: Host, session: str) -> None:
    """While it starts CRIU there are two of it for a moment."""
    until(lambda: len(host.holders(session)) == 1, 10, "its holder is there")
    os.kill(host.holder(session), 9)


def test_reference_prefers_the_fork_that_did_not_end(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    session = fenced_sessions.counter(a)
    for _ in range(2):
        made = a.cm_json("fork", "w", "branch")
        end(a, made["session"])
        a.ok("kill", "branch")
    last = a.cm_json("fork", "w", "branch")["session"]
    assert fenced_sessions.lease(b, "branch")["state"] == "held"
    a.ok("checkpoint", "branch")
    assert b.cm_json("restore", "branch")["session"] == last
    fenced_sessions.counts_on(b, last)
    fenced_sessions.counts_on(a, session)
