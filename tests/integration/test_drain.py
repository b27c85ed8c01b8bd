"""drain, undrain: over real sshds, with sessions that count."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cmdop_migrate import clock, config
from cmdop_migrate.drain import drain as drain_flow
from cmdop_migrate.drain import runner
from cmdop_migrate.host.host import Host as LocalHost
from cmdop_migrate.host.resources import TEST_STOP
from cmdop_migrate.util.signals import Stop
from tests.support import fenced_sessions
from tests.support.host import CM, Host, until
from tests.support.host_group import World, several


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with several(tmp_path, "host-a", "host-b") as made:
        yield made


@contextlib.contextmanager
def draining(host: Host, *options: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """`drain --json`, under way."""
    process = subprocess.Popen(
        [*CM, "--json", "drain", *options],
        env=host.env(**environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    )
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(process.pid).children():
                one.kill()
        process.kill()
        process.communicate()


def stopped(process: subprocess.Popen[bytes], word: str = "migrate") -> list[psutil.Process]:
    """Those of its children that stopped themselves."""
    found = []
    for one in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() == psutil.STATUS_STOPPED and word in one.cmdline():
                found.append(one)
    return found


def lists(facts: dict[str, Any]) -> dict[str, list[str]]:
    return {word: sorted(one["name"] for one in facts[word]) for word in ("moved", "parked", "failed", "left")}


def test_drain_moves_sessions_and_undrain_brings_them_back(tmp_path: Path) -> None:
    with several(tmp_path, "host-a", "host-b", "host-c") as world:
        a = world["host-a"]
        sessions = {name: fenced_sessions.counter(a, name) for name in ("w1", "w2", "w3", "w4")}
        plan = a.cm_json("drain", "--dry-run", "--to", "host-b,host-c", "--deadline", "2m")
        assert len(plan["schedule"]) == 4 and {one["how"] for one in plan["schedule"]} == {"move"}
        assert not (a.state / "draining.json").exists()
        facts = a.cm_json("drain", "--deadline", "2m", timeout=120)  # all hosts it knows
        assert lists(facts) == {"moved": ["w1", "w2", "w3", "w4"], "parked": [], "failed": [], "left": []}
        assert sorted(one["to"] for one in facts["moved"]) == ["host-b", "host-b", "host-c", "host-c"]
        assert facts["deadline_kept"]
        for one in facts["moved"]:
            fenced_sessions.counts_on(world[one["to"]], one["session"])
            assert world.where(one["session"]) == [one["to"]]
        a.assert_clean(ended=True)
        gone, on, parked, _ = facts["moved"]
        world[gone["to"]].ok("kill", gone["session"])
        other = {"host-b": "host-c", "host-c": "host-b"}[on["to"]]
        world[on["to"]].ok("migrate", on["session"], "--to", other)  # it is found where it is now
        world[parked["to"]].ok("checkpoint", parked["session"])
        facts = a.cm_json("undrain", "--bring-back", timeout=120)
        assert [one["session"] for one in facts["ended"]] == [gone["session"]] and facts["away"] == []
        assert {one["session"] for one in facts["restored"]} == {*sessions.values()} - {gone["session"]}
        for one in facts["restored"]:
            fenced_sessions.counts_on(a, one["session"])
            assert world.where(one["session"]) == ["host-a"]
        assert a.cm_json("undrain", "--bring-back")["restored"] == []  # once is enough
        for one in facts["restored"]:  # these hosts share a network: an address of one may have come along
            a.ok("kill", "--signal", "KILL", one["session"])
        for host in world.hosts.values():
            host.assert_clean(ended=True)


def test_drain_refuses_bad_input_and_drains_an_empty_host(world: World) -> None:
    a = world["host-a"]
    assert "host-b" in a.fails("drain", "--to", "host-x", status=3, code="host_not_found")["hint"]
    assert "itself" in a.fails("drain", "--to", "host-b,host-a", status=2, code="usage")["message"]
    a.fails("drain", "--deadline", "0", status=2, code="usage")
    a.fails("drain", "--parallel", "5", status=2, code="usage")
    a.fails("drain", "--park", "--to", "host-b", status=2, code="usage")
    a.fails("drain", "--bandwidth", "1KiB", status=2, code="usage")
    a.fails("undrain", "--bring-back", "--accept", "nothing", status=2, code="usage")
    fenced_sessions.counter(a)
    command = str(world.dir / "cm-host-a")
    where = (world.sshds["host-a"].address, "--user", "root", "--key", str(world.dir / "login"), "--command", command)
    a.ok("hosts", "add", "again", *where, "--yes")
    assert "itself" in a.fails("drain", "--to", "again", status=2, code="usage")["message"]
    a.ok("kill", "w")
    assert not (a.state / "draining.json").exists()
    assert lists(a.cm_json("drain")) == {"moved": [], "parked": [], "failed": [], "left": []}
    error = a.fails("run", "-d", "--", "true", status=4, code="blocked")
    assert "undrain" in error["hint"]
    assert a.cm_json("ls")["draining"]["drain"]
    assert "drained" in a.ok("doctor") and "This host is draining" in a.cm("ls").stderr.decode()
    fenced_sessions.counter(world["host-b"])
    error = world["host-b"].fails("migrate", "w", "--to", "host-a", status=4, code="blocked")
    assert "host-a is being drained" in error["message"]
    world["host-b"].ok("checkpoint", "w")
    a.ok("undrain")
    assert "draining" not in a.cm_json("ls")
    a.start("true", name="again")


@pytest.mark.parametrize("is_full", [False, True])
def test_drain_continues_when_its_output_is_closed_or_full(host: Host, is_full: bool) -> None:
    """The connection it was started over is gone, or the disk is full of what it said: the host is emptied."""
    for name in "abc":
        host.start("sleep", "1000", name=name)
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full, os.fdopen(writer, "wb") as broken:
        words = [*CM, "drain", "--park", "--parallel", "1"]
        done = subprocess.run(
            words, env=host.env(), stdout=full if is_full else broken, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == int(is_full), done.stderr
    assert (b"cannot write to standard output: No space left" in done.stderr) is is_full
    assert [one["state"] for one in host.sessions()] == ["parked"] * 3
    assert "drained" in [event["event"] for event in host.events()]


def test_drain_without_target_time_or_store_leaves_sessions(world: World) -> None:
    a = world["host-a"]
    stubborn = a.dir / "no"
    stubborn.write_text("#!/bin/sh\necho not now; exit 1\n")
    stubborn.chmod(0o755)
    fenced_sessions.counter(a, "stays", "--hook", f"pre-freeze={stubborn}")
    fenced_sessions.counter(a, "parks")
    world.sshds["host-b"].stop()
    done = a.cm("--json", "drain", "--to", "host-b", "--parallel", "2")
    facts = json.loads(done.stdout)
    assert done.returncode == 10 and facts["error"]["code"] == "partial", facts
    assert lists(facts) == {"moved": [], "parked": ["parks"], "failed": ["stays"], "left": []}
    assert facts["parked"][0]["why"] == "no host to move it to" and not facts["targets"][0]["ok"]
    assert "not now" in facts["failed"][0]["why"] and "stays" in facts["error"]["message"]
    fenced_sessions.counts_on(a, facts["failed"][0]["session"])
    error = a.fails("restore", "parks", status=4, code="blocked")
    assert "being drained" in error["message"]
    world.sshds["host-b"].start()
    slow = world.dir / "cm-host-b"
    hangs = f'case " $* " in *" --standby "*) echo $$ >> {world.dir}/hang; exec sleep 60;; esac'
    slow.write_text(slow.read_text().replace("\n", f"\n{hangs}\n", 1))
    stubborn.write_text("#!/bin/sh\nexit 0\n")
    facts = a.cm_json("drain", "--to", "host-b", "--deadline", "20s")  # the target never gets ready
    assert lists(facts) == {"moved": [], "parked": ["stays"], "failed": [], "left": []}
    assert facts["parked"][0]["why"] == "no time to move it", facts
    a.assert_clean(ended=True)
    facts = a.cm_json("undrain", "--bring-back")
    assert sorted(one["name"] for one in facts["restored"]) == ["parks", "stays"]
    facts = a.cm_json("drain", "--deadline", "5s")  # no time for more than that
    assert lists(facts) == {"moved": [], "parked": ["parks", "stays"], "failed": [], "left": []}, facts
    facts = a.cm_json("undrain", "--bring-back")
    for one in facts["restored"]:
        fenced_sessions.counts_on(a, one["session"])
    for pid in (world.dir / "hang").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def test_second_drain_is_refused_and_interrupt_finishes_moves_under_way(world: World) -> None:
    a = world["host-a"]
    sessions = {name: fenced_sessions.counter(a, name) for name in ("w1", "w2", "w3")}
    with draining(a, "--parallel", "1", **{TEST_STOP: "migrate:begin ship"}) as first:
        (child,) = until(lambda: stopped(first), 30, "a move stands still")
        error = a.fails("drain", status=4, code="blocked")
        assert str(first.pid) in error["message"]
        a.fails("undrain", status=4, code="blocked")
        first.send_signal(signal.SIGINT)
        child.resume()  # what is under way finishes
        out, _ = first.communicate(timeout=60)
        facts = json.loads(out)
    assert first.returncode == 10 and len(facts["moved"]) == 1 and len(facts["left"]) == 2, facts
    assert {one["why"] for one in facts["left"]} == {"interrupted"}
    for one in facts["left"]:
        fenced_sessions.counts_on(a, one["session"])
    facts = a.cm_json("drain", "--bandwidth", "20MiB", timeout=120)
    assert len(facts["moved"]) == 2, facts
    assert all(world.where(session) == ["host-b"] for session in sessions.values())


def test_drain_killed_and_run_again_continues(world: World) -> None:
    a = world["host-a"]
    sessions = {name: fenced_sessions.counter(a, name) for name in ("w1", "w2", "w3")}
    with draining(a, **{TEST_STOP: "migrate:begin ship"}) as first:
        both = until(lambda: len(found := stopped(first)) == 2 and found, 30, "two moves stand still")
        first.kill()
        first.communicate()
        one, other = both  # type: ignore[misc]  # two of them, by the call before
        os.kill(one.pid, signal.SIGKILL)  # cut off
        with draining(a) as second:
            until(lambda: len(list(a.state.glob("drains/*.json"))) == 1, 5)
            other.resume()  # no process waits for this move; it finishes by itself
            out, said = second.communicate(timeout=120)
    assert second.returncode == 0, said
    facts = json.loads(out)
    assert lists(facts) == {"moved": ["w1", "w2", "w3"], "parked": [], "failed": [], "left": []}, facts
    for session in sessions.values():
        fenced_sessions.counts_on(world["host-b"], session)
        assert world.where(session) == ["host-b"]
    a.assert_clean(ended=True)


def test_interrupted_test_leaves_no_stopped_migration(tmp_path: Path) -> None:
    """The drain that started the move is dead, and no process can continue it: as when the suite is interrupted."""
    with pytest.raises(KeyboardInterrupt), several(tmp_path, "host-a", "host-b") as world:
        a = world["host-a"]
        fenced_sessions.counter(a)
        with draining(a, **{TEST_STOP: "migrate:begin ship"}) as drain:
            (child,) = until(lambda: stopped(drain), 30, "a move stands still")
            drain.kill()
            drain.communicate()
            raise KeyboardInterrupt
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_drain_waits_for_a_session_whose_migration_was_killed(world: World) -> None:
    """It is neither here nor away, until the agent has asked its lease."""
    a = world["host-a"]
    session = fenced_sessions.counter(a)
    agent = a.agent_pid()
    assert agent is not None
    with draining(a, **{TEST_STOP: "migrate:begin restore"}) as drain:
        (child,) = until(lambda: stopped(drain), 30, "a move stands still")
        with fenced_sessions.halted(agent):
            child.kill()
            time.sleep(2)
            assert drain.poll() is None, drain.communicate()
        out, said = drain.communicate(timeout=60)
    facts = json.loads(out)
    assert drain.returncode == 0, said
    assert lists(facts) == {"moved": ["w"], "parked": [], "failed": [], "left": []}, facts
    assert world.where(session) == ["host-b"]


def test_session_whose_handover_failed_keeps_its_failed_attempt(world: World) -> None:
    """The lease store goes away in the middle of it, and is there again: the session is back, and next it is parked."""
    a = world["host-a"]
    session = fenced_sessions.counter(a)
    with draining(a, **{TEST_STOP: "checkpoint:committing"}) as drain:
        (child,) = until(lambda: stopped(drain), 30, "its move stands still")
        with fenced_sessions.away(world.dir / "lease"):
            child.resume()
            until(lambda: not psutil.pid_exists(child.pid), 60, "it gives up")
            assert fenced_sessions.record(a, session)["phase"] == "handing"
        (child,) = until(lambda: [*stopped(drain), *stopped(drain, "checkpoint")], 60, "it is taken up again")
        assert "checkpoint" in child.cmdline()
        child.resume()
        out, said = drain.communicate(timeout=60)
    facts = json.loads(out)
    assert drain.returncode == 0, said
    assert lists(facts) == {"moved": [], "parked": ["w"], "failed": [], "left": []}, facts
    assert facts["parked"][0]["why"].startswith("not moved: "), facts
    assert [one["state"] for one in a.sessions()] == ["parked"] and world.where(session) == []


def test_undrain_brings_back_a_session_that_drain_stopped_waiting_for(world: World) -> None:
    """Told thrice to stop, a drain leaves what is under way to itself; it may go yet."""
    a = world["host-a"]
    session = fenced_sessions.counter(a)
    with draining(a, **{TEST_STOP: "migrate:begin restore"}) as drain:
        (child,) = until(lambda: stopped(drain), 30, "a move stands still")
        while drain.poll() is None:
            drain.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                drain.wait(0.5)
        facts = json.loads(drain.communicate()[0])
    assert drain.returncode == 10 and lists(facts)["left"] == ["w"], facts
    child.resume()
    until(lambda: not psutil.pid_exists(child.pid) and world.where(session) == ["host-b"], 30, "it went")
    facts = a.cm_json("undrain", "--bring-back")
    assert [one["name"] for one in facts["restored"]] == ["w"], facts
    assert world.where(session) == ["host-a"]
    fenced_sessions.counts_on(a, session)


@pytest.mark.parametrize(
    ("word", "step", "options"), [("migrate", "begin ship", ()), ("checkpoint", "dump", ("--park",))]
)
def test_undrain_does_not_report_a_session_under_way_as_back(
    world: World, word: str, step: str, options: tuple[str, ...]
) -> None:
    a = world["host-a"]
    session = fenced_sessions.counter(a)
    with draining(a, *options, **{TEST_STOP: f"{word}:{step}"}) as drain:
        (child,) = until(lambda: stopped(drain, word), 30, "it stands still")
        drain.kill()
        drain.communicate()
        done = a.cm("--json", "undrain", "--bring-back")
        facts = json.loads(done.stdout)
        child.resume()
    assert done.returncode == 10 and facts["restored"] == [], facts
    assert [one["name"] for one in facts["failed"]] == ["w"] and "right now" in facts["failed"][0]["why"]
    where = ["host-b"] if word == "migrate" else []
    until(lambda: not psutil.pid_exists(child.pid) and world.where(session) == where, 30, "it went")
    facts = a.cm_json("undrain", "--bring-back")
    assert [one["name"] for one in facts["restored"]] == ["w"], facts
    fenced_sessions.counts_on(a, session)


def test_moves_are_interrupted_and_then_abandoned_long_after_the_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both moves are stopped (SIGSTOP), and do not receive the request to end."""
    a = world["host-a"]
    sessions = {name: fenced_sessions.counter(a, name) for name in ("w1", "w2")}
    for key, value in a.env(**{TEST_STOP: "migrate:begin ship"}).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(runner, "OVERTIME", 1.0)
    monkeypatch.setattr(runner, "ABANDON", 3.0)
    records, began = LocalHost(config.load()), clock.boottime()
    options = drain_flow.DrainOptions(hosts=("host-b",), deadline=20.0, parallel=2)
    result = drain_flow.drain(records, options, (), Stop(), lambda _: None)
    assert 20.0 < clock.boottime() - began < 20.0 + 3.0 + 10.0, "its bounds, and time for a busy machine"
    assert sorted((entry.name, entry.state) for entry in result.entries) == [("w1", "left"), ("w2", "left")], result
    assert {entry.why for entry in result.of("left")} == {"still under way; see: cmdop-migrate resume"}
    assert not result.deadline_kept
    for one in psutil.Process().children():  # the request to stop was sent, and is received now
        with contextlib.suppress(psutil.NoSuchProcess):  # a child that ended and was not reaped yet
            if "migrate" in one.cmdline():
                one.resume()
                one.wait(30)
    monkeypatch.delenv(TEST_STOP)
    a.cm("resume")
    for session in sessions.values():
        assert world.where(session) == ["host-a"]
        fenced_sessions.counts_on(a, session)
    facts = a.cm_json("drain", timeout=120)
    assert lists(facts) == {"moved": ["w1", "w2"], "parked": [], "failed": [], "left": []}, facts


def test_drain_continues_when_a_target_becomes_unreachable(tmp_path: Path) -> None:
    with several(tmp_path, "host-a", "host-b", "host-c") as world:
        a = world["host-a"]
        for name in ("w1", "w2", "w3"):
            fenced_sessions.counter(a, name)
        with draining(a, "--parallel", "2", **{TEST_STOP: "migrate:begin ship"}) as drain:
            until(lambda: len(stopped(drain)) == 2, 30, "two moves stand still, one to each")
            world.sshds["host-b"].stop()
            while drain.poll() is None:
                for child in stopped(drain):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.resume()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    drain.wait(0.2)
            out, said = drain.communicate()
        facts = json.loads(out)
        assert drain.returncode == 0, (facts, said)
        assert {one["to"] for one in facts["moved"]} == {"host-c"} and len(facts["moved"]) == 3, facts
        for one in facts["moved"]:
            fenced_sessions.counts_on(world["host-c"], one["session"])
            assert world.where(one["session"]) == ["host-c"]
        a.assert_clean(ended=True)


def test_drain_keeps_within_its_bandwidth(world: World) -> None:
    a = world["host-a"]
    held = "import os, time; held = os.urandom(6 << 20); print('ready', flush=True); time.sleep(1000)"
    a.start(sys.executable, "-c", held, name="w")
    a.wait_for("w", "ready")
    facts = a.cm_json("drain", "--park", "--parallel", "1", "--bandwidth", "2MiB")
    assert facts["parked"][0]["why"] == "as asked"
    assert facts["took_s"] > 3.0  # 6 MiB that do not shrink
    assert "drain" in a.ok("checkpoints", "ls")
