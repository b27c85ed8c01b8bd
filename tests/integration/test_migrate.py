"""Move a running session to another host, over a real sshd."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate.holder import cgroup
from cmdop_migrate.host.move_journal import End, Moves
from cmdop_migrate.session.holder_client import Channel
from cmdop_migrate.util.faults import TEST_STOP
from tests.crash.witness import LARGE, Witness, finished, stopped
from tests.support import fenced_sessions
from tests.support.host import CM, Host, until
from tests.support.host_pair import World, two


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with two(tmp_path_factory.mktemp("two")) as made:
        yield made


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    """Without sessions of other tests."""
    yield shared
    shared.clear()


def dies(host: Host, name: str) -> None:
    host.ok("kill", name, "--signal", "KILL")


def test_migrated_session_keeps_counting(world: World, tmp_path: Path) -> None:
    a, b = world.a, world.b
    session = fenced_sessions.counter(a, "w1")
    page = tmp_path / "move.html"
    lines = a.ok("--json", "migrate", "w1", "--to", "host-b", "--report", str(page), "--progress").splitlines()
    *progress, facts = map(json.loads, lines)
    assert (facts["session"], facts["from"], facts["to"], facts["token"]) == (session, "host-a", "host-b", 2)
    assert 0 < facts["frozen_s"] <= facts["downtime_s"] < facts["took_s"]
    assert facts["downtime"] == {"from": "last output", "until": "first output"}
    assert {"plan", "freeze", "dump", "upload", "commit", "there", "there.restore", "forget"} <= set(facts["phases"])
    stages = list(dict.fromkeys(one["progress"]["stage"] for one in progress))
    assert stages == ["plan", "stand-by", "ship", "restore", "forget"]
    done = [one["progress"]["done"] for one in progress]
    assert done == sorted(done) or facts["warnings"] is not None  # better figures may come with the plan
    assert page.read_text().count("<rect") >= 10
    fenced_sessions.counts_on(b, session)
    assert world.where(session) == ["host-b"]
    (row,) = a.sessions()
    assert (row["state"], row["note"]) == ("exited", "moved to host-b (token 2)")
    a.assert_clean(ended=True)
    assert world.resume() == []
    assert fenced_sessions.event(a, session, "migrated")["downtime_s"] == facts["downtime_s"]
    b.ok("checkpoint", "w1")
    a.ok("restore", session)  # and back, from the store
    fenced_sessions.counts_on(a, session)


def test_unwritable_report_does_not_hide_the_migration(world: World) -> None:
    session = fenced_sessions.counter(world.a, "full")
    done = world.a.cm("--json", "migrate", "full", "--to", "host-b", "--report", "/dev/full")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["to"] == "host-b"
    assert b"cannot write /dev/full: No space left on device" in done.stderr
    assert world.where(session) == ["host-b"]


def test_pre_copy_ships_only_changed_pages_at_the_end(world: World) -> None:
    a, b = world.a, world.b
    one = Witness.start(a, "big", LARGE)
    facts = a.cm_json("migrate", "big", "--to", "host-b", "--pre-ship", "2")
    assert {"pre_ship_1", "pre_ship_2"} <= set(facts["phases"])
    assert facts["bytes"]["new"] < facts["bytes"]["memory"] // 4, facts["bytes"]
    there = Witness(b, "big", one.session)
    there.assert_runs()
    assert world.where(one.session) == ["host-b"]
    assert os.listdir(b.state / "ahead") == []


def test_downtime_of_a_quiet_session_is_measured_from_the_freeze(world: World) -> None:
    world.a.start("sleep", "1000", name="quiet")
    time.sleep(1.1)
    facts = world.a.cm_json("migrate", "quiet", "--to", "host-b")
    assert facts["downtime"] == {"from": "freeze", "until": "running"}
    assert facts["downtime_s"] == facts["frozen_s"]


def test_restore_and_fork_on_another_host(world: World) -> None:
    a, b = world.a, world.b
    session = fenced_sessions.counter(a, "w2")
    error = a.fails("restore", "w2", "--to", "host-b", status=5, code="fenced")
    assert "migrate w2 --to host-b" in error["hint"]
    branch = a.cm_json("fork", "w2", "w2-2", "--to", "host-b")
    assert (branch["parent"], branch["host"]) == (session, "host-b")
    fenced_sessions.counts_on(b, branch["session"])
    fenced_sessions.counts_on(a, session)
    a.ok("checkpoint", "w2")
    parked = len(fenced_sessions.numbers(a, session))
    facts = a.cm_json("restore", "--to", "host-b")
    assert (facts["session"], facts["host"], facts["token"]) == (session, "host-b", 2)
    assert fenced_sessions.counts_on(b, session) >= parked
    assert fenced_sessions.record(a, session)["exit"]["reason"] == "moved to host-b (token 2)"
    a.fails("restore", session, "--to", "host-b", status=5, code="fenced")


def test_session_resumes_here_if_the_target_cannot_restore_it(world: World) -> None:
    """Found out only when it is there already: a session of that name."""
    a, b = world.a, world.b
    session = fenced_sessions.counter(a, "w3")
    b.start("sleep", "1000", name="w3")
    assert "name" in a.fails("migrate", "w3", "--to", "host-b", status=4, code="blocked")["message"]
    error = a.fails("migrate", "w3", "--to", "host-b", "--accept", "name", status=4, code="blocked")
    assert "keeps running here (token " in error["hint"], error
    fenced_sessions.counts_on(a, session)
    assert world.where(session) == ["host-a"]
    found = fenced_sessions.lease(a, session)
    assert (found["holder"], found["token"]) == ("host-a", 3)  # taken back twice: `fails` tries both ways
    inside = f"/proc/{a.pids(session)[0]}/root/run/cmdop-migrate/token"
    assert Path(inside).read_text() == "3\n"
    assert world.resume() == []
    dies(b, "w3")
    assert a.cm_json("migrate", "w3", "--to", "host-b")["token"] == 4
    fenced_sessions.counts_on(b, session)


@pytest.mark.parametrize("step", ["migrate:hand-over", "checkpoint:committing"])
def test_ctrl_c_during_the_hand_over(world: World, step: str) -> None:
    """It keeps running here, or resumes there: the lease decides."""
    flow, _, at = step.partition(":")
    name = f"{flow}-{at}"
    session = fenced_sessions.counter(world.a, name)
    env = world.a.env(**{TEST_STOP: step})
    words = [*CM, "--json", "migrate", name, "--to", "host-b"]
    cli = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    until(lambda: Path(f"/proc/{cli.pid}/stat").read_text().split()[2] == "T", 60, f"it stands at {step}")
    assert cgroup.is_frozen(world.a.group(session))
    cli.send_signal(signal.SIGINT)
    cli.send_signal(signal.SIGCONT)
    status, answer = finished(cli)
    assert status == 130, answer
    (where,) = until(lambda: world.where(session), 10)
    fenced_sessions.counts_on({"host-a": world.a, "host-b": world.b}[where], session)
    assert world.resume() == []


def test_second_migration_and_other_commands_during_a_migration(world: World) -> None:
    a = world.a
    session = fenced_sessions.counter(a, "w5")
    with stopped(a, "hand-over", "migrate", "w5", "--to", "host-b") as (cli, _):
        assert "already" in a.fails("migrate", "w5", "--to", "host-b", status=4, code="blocked")["message"]
        assert "right now" in a.fails("resume", status=4, code="blocked")["message"]
        a.fails("checkpoint", "w5", status=4, code="blocked")
        cli.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 0, answer
    fenced_sessions.counts_on(world.b, session)


def test_resume_reports_known_and_unknown_ends(world: World) -> None:
    a = world.a
    known, unknown = fenced_sessions.counter(a, "w7"), "f" * 24
    moves = Moves(a.state, keep=0.0)
    with moves.lock(unknown) as is_ours:
        assert is_ours
        first = moves.begin(known, "w7", "host-a", "host-b", 1)
        second = moves.begin(unknown, "w8", "host-a", "host-b", 1)
        done = a.cm("--json", "resume")
    moves.end(second, End.EXITED, told=True)
    answer = json.loads(done.stdout)
    assert done.returncode == answer["error"]["exit"] == 10, answer
    assert [(one["id"], one["ended"]) for one in answer["migrations"]] == [(first.id, "on_source")]
    assert "w8" in answer["error"]["message"]


def test_unreadable_journal_of_a_move(world: World) -> None:
    """Written by another version, or damaged: the session is frozen, and the lease decides who has it nevertheless."""
    a = world.a
    session = fenced_sessions.counter(a, "w9")
    (a.state / "migrations").mkdir(exist_ok=True)
    (a.state / "migrations" / "odd.json").write_text('{"version": 2, "session": ')
    with Channel(a.run / f"{session}.sock") as channel:
        assert "pid" in channel.ask(op="freeze")
        assert "error" not in channel.ask(op="hand_over", checkpoint="c" * 32)
    until(lambda: a.cm_json("show", session)["state"] == "running", 20, "its agent takes it back")
    fenced_sessions.counts_on(a, session)
    (move,) = world.resume()
    assert (move["session"], move["ended"]) == (session, "on_source")
    (a.state / "migrations" / "odd.json").unlink()


def test_session_that_exits_during_its_migration(world: World) -> None:
    a = world.a
    a.start("sh", "-c", "read line; exit 3", name="brief")
    with stopped(a, "begin ship", "migrate", "brief", "--to", "host-b") as (cli, _):
        a.ok("send", "brief", "go", "--enter")
        until(lambda: not a.pids(answer_session(a, "brief")), 10, "it ends")
        cli.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert (status, answer["error"]["code"]) == (4, "session_exited"), answer
    assert "exited 3" in answer["error"]["message"] and "has ended" in answer["error"]["hint"]
    assert world.resume() == []


def answer_session(host: Host, name: str) -> str:
    (row,) = [one for one in host.sessions() if one["name"] == name]
    return str(row["session"])


def test_invalid_options_are_refused(world: World, tmp_path: Path) -> None:
    a = world.a
    session = fenced_sessions.counter(a, "w6")
    a.fails("migrate", "w6", "--to", "nowhere", status=3, code="host_not_found")
    a.fails("migrate", "nobody", "--to", "host-b", status=3, code="session_not_found")
    a.fails("migrate", "w6", "--to", "host-a", status=2, code="usage")
    a.fails("migrate", "w6", "--to", "host-b", "--pre-ship", "11", status=2, code="usage")
    a.fails("migrate", "w6", "--to", "host-b", "--pre-ship", "-1", status=2, code="usage")
    a.fails("migrate", "w6", "--to", "host-b", "--accept", "nonsense", status=2, code="usage")
    a.fails("migrate", "w6", "--to", "host-b", "--report", f"{tmp_path}/no/such.html", status=2, code="usage")
    a.fails("resume", "ffffff", status=3, code="not_found")
    assert a.cm_json("resume") == {"migrations": []}
    fenced_sessions.counts_on(a, session)


def test_unfit_target_is_refused(world: World) -> None:
    """Said before anything is frozen."""
    a = world.a
    session = fenced_sessions.counter(a, "w7")
    try:
        world.set_there(CMDOP_MIGRATE_CRIU="/bin/false")
        assert "CRIU" in a.fails("migrate", "w7", "--to", "host-b", status=4, code="blocked")["message"]
        error = a.fails("migrate", "w7", "--to", "host-b", "--accept", "host_ready", status=4, code="blocked")
        assert "keeps running here" in error["hint"], error  # nor does the target, asked to stand by, pretend
    finally:
        world.set_there()
    fenced_sessions.counts_on(a, session)
    assert not [one for one in a.events(session) if one["event"] == "checkpointed"]


def test_target_whose_disk_fills_after_the_plan(world: World) -> None:
    """`plan` looks at the state directory; here its sessions lie on a smaller disk of their own."""
    a, b = world.a, world.b
    one = Witness.start(a, "w8", size=LARGE)
    there = b.state / "sessions"
    there.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(there)], check=True)
    try:
        a.ok("key", "show")  # makes one
        assert a.cm_json("plan", "w8", "--to", "host-b")["ok"]
        before = len(one.numbers())
        said = a.cm("--json", "migrate", "w8", "--to", "host-b", timeout=120)
        assert said.returncode == 4 and b"keeps running here" in said.stdout, said
        assert one.assert_runs() >= before
        assert world.where(one.session) == ["host-a"]
        assert world.resume() == []
        assert not [left for left in there.iterdir() if any(left.iterdir())], "nothing is left there"
    finally:
        subprocess.run(["umount", str(there)], check=True)
    a.cm_json("migrate", "w8", "--to", "host-b")
    moved = Witness(b, "w8", one.session)
    assert moved.assert_runs() >= before


@pytest.mark.parametrize("accept", [False, True])
def test_log_rotated_during_the_migration_blocks_unless_accepted(world: World, tmp_path: Path, accept: bool) -> None:
    """Without --accept it keeps running here; with it, it moves and reads the file of the target."""
    a, b = world.a, world.b
    log = tmp_path / "log"
    log.write_text("one\ntwo\n")
    program = 'read -r x <&7; echo "got $x"; while read -r line; do read -r x <&7; echo "got $x."; done'
    session = a.start("bash", "-c", f"exec 7< {log}; {program}", name="log")["session"]
    a.wait_for("log", "got one")
    words = ["--accept", "files"] if accept else []
    with stopped(a, "hand-over", "migrate", "log", "--to", "host-b", *words) as (cli, standing):
        log.unlink()
        log.write_text("new\nred\n")
        os.kill(standing.pid, signal.SIGCONT)
        status, answer = finished(cli)
    here = b if accept else a
    assert (status == 0) is accept, answer
    assert world.where(session) == ["host-b" if accept else "host-a"]
    here.ok("send", "log", "on", "--enter")
    here.wait_for("log", r"got red\." if accept else r"got two\.")


def test_restore_on_another_host_with_accepted_files(world: World, tmp_path: Path) -> None:
    """Parked, its log removed: `restore --to` says so, and takes the same word."""
    a, b = world.a, world.b
    log = tmp_path / "log"
    log.write_text("one\n")
    session = a.start("bash", "-c", f"exec 7< {log}; echo up; while read -r line; do echo did; done", name="log")[
        "session"
    ]
    a.wait_for("log", "up")
    a.ok("checkpoint", "log")
    log.unlink()
    error = a.fails("restore", "log", "--to", "host-b", status=4, code="blocked")
    assert str(log) in error["message"]
    assert a.cm_json("restore", "log", "--to", "host-b", "--accept-files")["accepted"] == [str(log)]
    b.ok("send", session, "on", "--enter")
    b.wait_for(session, "did")
