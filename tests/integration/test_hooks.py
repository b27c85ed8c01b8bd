"""Executables told before a freeze, after a restore, of a new token, of a fence: real sessions, real moves."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import fenced_sessions
from tests.support.host import PROJECT, Host, pair, until
from tests.support.host_pair import two


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with pair(tmp_path) as both:
        yield both


def script(path: Path, text: str, mode: int = 0o755) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return str(path)


def host_hook(host: Host, event: str, text: str, name: str = "one") -> str:
    return script(host.dir / "hooks" / f"{event}.d" / name, text)


def noting(host: Host, event: str) -> Path:
    """A hook that appends the facts it is given to a file."""
    heard = host.dir / f"heard-{event}"
    host_hook(host, event, f"cat >> {heard}")
    return heard


def facts(heard: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in heard.read_text().splitlines()] if heard.exists() else []


def test_hooks_run_on_the_host_where_a_checkpoint_or_restore_happens(hosts: tuple[Host, Host]) -> None:
    """pre-freeze on the old host, token and post-restore on the new one; the session's own come along."""
    a, b = hosts
    heard = {(host.name, event): noting(host, event) for host in hosts for event in ("pre-freeze", "post-restore")}
    tokens = {host.name: noting(host, "token") for host in hosts}
    own = a.dir / "own"
    mine = script(a.dir / "mine", f"cat >> {own}; env | sort >> {own}.env; ls /proc/self/fd | wc -l >> {own}.fds")
    options = ("--hook", f"pre-freeze={mine}", "--hook", f"post-restore={mine}")
    begun = a.start("bash", "-c", fenced_sessions.COUNT, name="w", options=options)
    session = begun["session"]
    assert [one["event"] for one in begun["hooks"]] == ["token"] and begun["hooks"][0]["ok"]
    assert [(one["token"], one["reason"]) for one in facts(tokens["host-a"])] == [(1, "run")]
    done = a.cm_json("checkpoint", "w")
    assert [(one["event"], one["ok"]) for one in done["hooks"]] == [("pre-freeze", True)] * 2
    (before,) = facts(heard["host-a", "pre-freeze"])
    expected = {"event": "pre-freeze", "session": session, "name": "w", "host": "host-a", "token": 1, "from": "host-a"}
    assert before.items() >= {**expected, "reason": "checkpoint", "goes_on": False}.items()
    assert before["cgroup"] == a.group(session) and before["root"] == f"/proc/{before['pid']}/root"
    back = b.cm_json("restore", session)
    assert [one["event"] for one in back["hooks"]] == ["token", "post-restore", "post-restore"]
    assert all(one["ok"] for one in back["hooks"])
    (after,) = facts(heard["host-b", "post-restore"])
    expected = {"session": session, "host": "host-b", "from": "host-a", "to": "host-b", "token": 2}
    assert after.items() >= {**expected, "pid": back["pid"], "checkpoint": done["checkpoint"]}.items()
    assert [(one["token"], one["reason"]) for one in facts(tokens["host-b"])] == [(2, "restore")]
    assert [(one["event"], one["host"]) for one in facts(own)] == [("pre-freeze", "host-a"), ("post-restore", "host-b")]
    names = {line.partition("=")[0] for line in own.with_name("own.env").read_text().splitlines()}
    assert {"PATH", "CMDOP_MIGRATE_STATE_DIR", "CMDOP_MIGRATE_HOOK"} <= names and "TERM" not in names
    assert set(own.with_name("own.fds").read_text().split()) == {"4"}, "0, 1, 2, and what ls reads"
    assert b.cm_json("show", "w")["hooks"] == [
        {"event": "pre-freeze", "path": mine},
        {"event": "post-restore", "path": mine},
    ]
    fenced_sessions.counts_on(b, session)


def test_failing_pre_freeze_hook_stops_the_checkpoint(host: Host) -> None:
    session = fenced_sessions.counter(host)
    pids = host.pids(session)
    noted = host.dir / "after"
    hook = host_hook(host, "pre-freeze", "echo a table is half written >&2; exit 3")
    host_hook(host, "pre-freeze", f"touch {noted}", "two")
    error = host.fails("checkpoint", "w", status=4, code="blocked")
    assert f"{hook}: exited 3: a table is half written" in error["message"] and "keeps running" in error["hint"]
    host.fails("fork", "w", "copy", status=4, code="blocked")
    assert not noted.exists(), "after a no nobody else is asked"
    assert host.pids(session)[:2] == pids[:2] and fenced_sessions.event(host, session, "hook_failed")["exit"] == 3
    fenced_sessions.counts_on(host, session)
    assert host.cm_json("checkpoints", "ls")["checkpoints"] == []
    Path(hook).unlink()
    host.ok("checkpoint", "w")
    assert noted.exists()


def test_post_thaw_hooks_run_when_the_session_keeps_running_here(host: Host) -> None:
    """A copy, a later hook's no, and a checkpoint that fails half-way; not a check that stops it before the hooks."""
    before, after = noting(host, "pre-freeze"), noting(host, "post-thaw")
    session = fenced_sessions.counter(host)
    done = host.cm_json("checkpoint", "w", "--leave-running")
    assert [one["event"] for one in done["hooks"]] == ["pre-freeze", "post-thaw"]
    refuse = Path(host_hook(host, "pre-freeze", "exit 1", "two"))
    assert host.cm("checkpoint", "w").returncode == 4
    refuse.unlink()
    fenced_sessions.kill_at(host, "dump", "checkpoint", "w")
    assert (len(facts(before)), len(facts(after))) == (3, 2), "who is killed tells nobody"
    host.cm("checkpoint", "w", env={"CMDOP_MIGRATE_STORE": "file:///proc/none"})
    assert (len(facts(before)), len(facts(after))) == (3, 2)
    fenced_sessions.counts_on(host, session)
    host.ok("checkpoint", "w")
    assert (len(facts(before)), len(facts(after))) == (4, 2)


def test_hanging_hook_is_killed_with_its_children(host: Host) -> None:
    host.extra["CMDOP_MIGRATE_HOOK_TIMEOUT"] = "500ms"
    session = fenced_sessions.counter(host)
    pids = host.dir / "pids"
    hook = host_hook(host, "pre-freeze", f"echo began; sleep 1000 & echo $$ $! > {pids}; wait")
    error = host.fails("checkpoint", "w", status=4, code="blocked")
    assert f"{hook}: not done after 0.5 s, and killed: began" in error["message"]
    for pid in pids.read_text().split():
        until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), 5, f"{pid} is gone")  # type: ignore[misc]
    fenced_sessions.counts_on(host, session)


def test_untrusted_pre_freeze_hook_stops_the_checkpoint(host: Host, tmp_path: Path) -> None:
    fenced_sessions.counter(host)
    hook = Path(host_hook(host, "pre-freeze", "exit 0"))
    hook.chmod(0o757)
    assert "users other than root may write it" in host.fails("checkpoint", "w", status=4, code="blocked")["message"]
    hook.chmod(0o755)
    host.ok("checkpoint", "w", "--leave-running")
    good = script(tmp_path / "shared/hook", "exit 0")
    shared = ("--share", str(tmp_path / "shared"))
    host.fails("run", "-d", *shared, "--hook", f"token={good}", "--", "true", status=2, code="usage")


def test_failing_post_restore_hook_is_reported_and_the_session_runs(host: Host) -> None:
    session = fenced_sessions.counter(host)
    host.ok("checkpoint", "w")
    hook = host_hook(host, "post-restore", "echo no database; exit 1")
    done = host.cm("restore", "w")
    assert done.returncode == 0 and f"warning: post-restore hook {hook}: exited 1: no database" in done.stderr.decode()
    fenced_sessions.counts_on(host, session)
    assert fenced_sessions.event(host, session, "hook_failed")["of"] == "post-restore"
    host.ok("checkpoint", "w")
    (told,) = host.cm_json("restore", "w", "--lazy")["hooks"]
    expected = {"event": "post-restore", "hook": hook, "ok": False, "exit": 1, "output": "no database\n"}
    assert told.items() >= expected.items()


def test_restored_session_has_a_hook_that_this_host_lacks(hosts: tuple[Host, Host]) -> None:
    """Restored, it runs and the lack is reported; it cannot leave without the word it asked for."""
    a, b = hosts
    mine = Path(script(a.dir / "mine", "exit 0"))
    options = ("--hook", f"pre-freeze={mine}", "--hook", f"post-restore={mine}")
    session = a.start("bash", "-c", fenced_sessions.COUNT, name="w", options=options)["session"]
    a.ok("checkpoint", "w")
    mine.unlink()
    (told,) = b.cm_json("restore", session)["hooks"]
    assert told["problem"] == "not run: No such file or directory"
    fenced_sessions.counts_on(b, session)
    assert str(mine) in b.fails("checkpoint", "w", status=4, code="blocked")["message"]
    script(mine, "exit 0")
    b.ok("checkpoint", "w")


def test_fork_runs_hooks_of_both_sessions(host: Host) -> None:
    before, after, token = (noting(host, event) for event in ("pre-freeze", "post-restore", "token"))
    session = fenced_sessions.counter(host)
    forked = host.cm_json("fork", "w", "copy")
    assert [one["event"] for one in forked["hooks"]] == ["pre-freeze", "token", "post-restore"]
    (said,) = facts(before)
    assert said.items() >= {"session": session, "reason": "fork", "goes_on": True}.items()
    (said,) = facts(after)
    assert said.items() >= {"session": forked["session"], "parent": session, "reason": "fork"}.items()
    assert [one["session"] for one in facts(token)] == [session, forked["session"]]


def test_hook_that_makes_a_checkpoint_does_not_recurse(host: Host) -> None:
    fenced_sessions.counter(host)
    python = f"PYTHONPATH={PROJECT} {sys.executable} -m cmdop_migrate"
    host_hook(host, "pre-freeze", f"{python} checkpoint w --leave-running")
    error = host.fails("checkpoint", "w", status=4, code="blocked")
    assert "exited 4" in error["message"]


def test_on_fence_hook_runs_once(hosts: tuple[Host, Host]) -> None:
    """Told once, after this incarnation was killed; a hook that hangs holds up no lease."""
    a, b = hosts
    a.extra["CMDOP_MIGRATE_HOOK_TIMEOUT"] = "4s"
    heard = a.dir / "heard"
    host_hook(a, "on-fence", f"cat >> {heard}; sleep 1000")
    lost, kept = fenced_sessions.counter(a, "lost"), fenced_sessions.counter(a, "kept")
    a.ok("checkpoint", "lost", "--leave-running")
    b.ok("lease", "break", lost, "--yes")
    until(lambda: facts(heard), 10, "the hook hears of it")
    (said,) = facts(heard)
    assert said.items() >= {"event": "on-fence", "session": lost, "token": 1, "by": 2, "reason": "superseded"}.items()
    assert said["to"] == "host-b" and not a.pids(lost)
    failed = fenced_sessions.wait_event(a, lost, "hook_failed")
    assert failed["of"] == "on-fence" and failed["seconds"] >= 4
    events = [one["event"] for one in a.events(kept)]
    assert "fenced" not in events and "lease_unsure" not in events, "it never stood still meanwhile"
    fenced_sessions.counts_on(a, kept)
    assert len(facts(heard)) == 1


def test_migrate_runs_hooks_on_both_hosts_and_stops_if_one_fails(tmp_path: Path) -> None:
    with two(tmp_path) as world:
        a, b = world.a, world.b
        before, thawed, after = noting(a, "pre-freeze"), noting(a, "post-thaw"), noting(b, "post-restore")
        mine = Path(script(a.dir / "mine", "exit 0"))
        session = fenced_sessions.counter(a, "w", "--hook", f"post-restore={mine}")
        mine.unlink()
        a.ok("key", "show")  # makes one
        found = [one for one in a.cm_json("plan", "w", "--to", "host-b")["findings"] if one["check"] == "hooks"]
        assert [one["level"] for one in found] == ["warn"] and str(mine) in found[0]["message"]
        refuse = Path(host_hook(a, "pre-freeze", "echo not now; exit 1", "two"))
        error = a.fails("migrate", "w", "--to", "host-b", status=4, code="blocked")
        assert "not now" in error["message"] and "keeps running here" in error["hint"]
        assert world.where(session) == ["host-a"] and len(facts(before)) == len(facts(thawed)) == 2
        refuse.unlink()
        b.start("sleep", "1000", name="w")  # found out only when the session is there already
        said = a.cm("--json", "migrate", "w", "--to", "host-b", "--accept", "name")
        assert said.returncode == 4 and b"keeps running here" in said.stdout, said
        assert len(facts(before)) == len(facts(thawed)) == 3, "a move that is undone is told of too"
        assert facts(thawed)[-1].items() >= {"session": session, "token": 2}.items(), facts(thawed)[-1]
        b.ok("kill", "w")
        done = a.cm_json("migrate", "w", "--to", "host-b")
        told = [("pre-freeze", True), ("post-restore", True), ("post-restore", False)]
        assert [(one["event"], one["ok"]) for one in done["hooks"]] == told
        assert facts(before)[-1].items() >= {"reason": "migrate", "from": "host-a", "to": "host-b"}.items()
        (said,) = facts(after)
        assert said.items() >= {"from": "host-a", "to": "host-b", "token": 3, "session": session}.items()
        assert len(facts(thawed)) == 3, "it did not go on here"
        fenced_sessions.counts_on(b, session)
