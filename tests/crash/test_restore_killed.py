"""Kill each process of a restore at every step: parked as before and nothing ran, or, once it ran, no page missing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.crash.witness import LARGE, Witness, find, finished, gone, show, stopped
from tests.support.host import CM, Host, a_host, until
from tests.support.pty_client import Pty
from tests.support.sampling import sampled

BEFORE = ("choose", "fetch", "files", "holder")
STANDING = ("images", "restore", "pre-resume", "resumed")  # a holder is there; the session has not run yet
MEMORY = ("laid out", "served")
HOLDER_CELLS = [(step, memory) for step in STANDING for memory in MEMORY]
# The first steps are the same for both kinds of memory.
WORKER_CELLS = [(step, "laid out") for step in BEFORE] + [(BEFORE[3], "served")] + HOLDER_CELLS
Row = tuple[str, ...]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [("step", "memory", "killed", "exit", "session", "token")]


@pytest.fixture(scope="module")
def parked(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> Iterator[dict[str, Witness]]:
    """Two parked sessions that every test here finds and leaves parked: one small, one with memory served behind it."""
    if os.geteuid() != 0:
        pytest.skip("sessions need root")
    # The lease outlives what a test does while a restore is stopped at a step, on a busy machine too.
    with a_host(tmp_path_factory.mktemp("parked"), ttl="60s") as host:
        found = {"laid out": Witness.start(host, "small"), "served": Witness.start(host, "large", LARGE)}
        for one in found.values():
            host.cm_json("checkpoint", one.name)
        yield found
        for one in found.values():
            one.restore()
        show("restore, a process killed", rows, print)


def assert_untouched(one: Witness, counted: int) -> None:
    one.assert_parked()
    assert len(one.numbers()) == counted, "it ran"
    one.host.assert_clean(ended=True)


@pytest.mark.parametrize(("step", "memory"), sampled(WORKER_CELLS, 6, "restore, its worker killed"))
def test_restore_process_killed_before_the_session_ran(
    parked: dict[str, Witness], rows: list[Row], memory: str, step: str
) -> None:
    one = parked[memory]
    counted, token = len(one.numbers()), one.record()["token"]
    with stopped(one.host, step, "restore", one.name) as (cli, worker):
        assert worker.pid != cli.pid
        gone(worker)
        status, answer = finished(cli)
    assert (status, answer["error"]["code"]) == (1, "unexpected") and answer["error"]["hint"], answer
    assert_untouched(one, counted)
    assert one.record()["token"] == token
    rows.append((step, memory, "worker", str(status), one.state, str(token)))


@pytest.mark.parametrize(("step", "memory"), sampled(HOLDER_CELLS, 4, "restore, its holder killed"))
def test_holder_killed_before_the_session_ran(
    parked: dict[str, Witness], rows: list[Row], memory: str, step: str
) -> None:
    one = parked[memory]
    counted = len(one.numbers())
    with stopped(one.host, step, "restore", one.name) as (cli, worker):
        gone(psutil.Process(until(lambda: _only_holder(one), 10, "its holder is there")))
        worker.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status in (1, 8) and answer["error"]["hint"], answer
    assert_untouched(one, counted)
    rows.append((step, memory, "holder", str(status), one.state, str(one.record()["token"])))


def _only_holder(one: Witness) -> int | None:
    """While it starts CRIU there are two of it for a moment."""
    found = one.host.holders(one.session)
    return found[0] if len(found) == 1 else None


@pytest.mark.parametrize(("memory", "victim", "step"), [
    ("laid out", "swrk", "images"), ("laid out", "swrk", "restore"),
    ("laid out", "swrk", "pre-resume"), ("served", "swrk", "pre-resume"),
])  # fmt: skip
def test_criu_killed_before_the_session_ran(
    parked: dict[str, Witness], rows: list[Row], memory: str, victim: str, step: str
) -> None:
    one = parked[memory]
    counted = len(one.numbers())
    with stopped(one.host, step, "restore", one.name) as (cli, worker):
        gone(until(lambda: find(worker.pid, victim), 10, f"criu {victim} runs"))
        worker.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 8 and answer["error"]["code"] == "criu_failed", answer
    assert_untouched(one, counted)
    rows.append((step, memory, f"criu {victim}", str(status), one.state, str(one.record()["token"])))


def test_restore_killed_while_memory_arrives_never_leaves_missing_pages(
    parked: dict[str, Witness], rows: list[Row]
) -> None:
    one = parked["served"]
    token = one.record()["token"]
    with stopped(one.host, "memory", "restore", one.name) as (cli, worker):
        gone(worker)
        status, answer = finished(cli)
    if status == 0:
        pytest.skip("all memory was there before it could be killed")
    assert status in (1, 8), answer
    until(lambda: one.state == "parked", 10, "its holder ends it")
    one.assert_parked()
    assert "BAD" not in one.host.output(one.session)
    assert one.record()["token"] > token, "it may have run: the next incarnation must be told from this one"
    last = one.host.events(one.session)[-1]
    assert last["event"] in ("parked", "memory_lost") and "memory" in last["reason"], last
    one.host.assert_clean(ended=True)
    rows.append(("memory", "served", "worker", str(status), one.state, str(token + 1)))


@pytest.mark.parametrize("step", ["restore", "pre-resume"])
def test_killed_restore_over_an_ended_session_leaves_no_plaintext(host: Host, step: str) -> None:
    """Worker and holder are killed: only the next command cleans up. The record of the session is unchanged."""
    one = Witness.start(host)
    host.cm_json("checkpoint", one.name, "--leave-running")
    gone(psutil.Process(host.holder(one.session)))
    assert one.state == "exited"
    with stopped(host, step, "restore", one.name) as (_, worker):
        holder = psutil.Process(until(lambda: _only_holder(one), 10, "its holder is there"))
        holder.suspend()
        gone(worker)
        gone(holder)
        where = host.state / "sessions" / one.session
        assert (where / "images").exists()
    assert one.state == "exited" and one.record()["exit"]["reason"] == "its holder died"
    assert not [name for name in ("image", "images", "dump") if (where / name).exists()] and not host.pids(one.session)
    host.assert_clean(ended=True)
    one.host.cm_json("restore", one.session)
    one.assert_runs()


def test_restore_killed_once_the_session_runs_leaves_no_plaintext(host: Host) -> None:
    one = Witness.start(host)
    host.cm_json("checkpoint", one.name)
    with stopped(host, "adopted", "restore", one.name) as (_, worker):
        gone(worker)
    one.assert_runs()
    assert not (host.state / "sessions" / one.session / "images").exists()


def test_ctrl_c_or_a_closed_terminal_does_not_stop_a_restore(parked: dict[str, Witness]) -> None:
    one = parked["laid out"]
    with stopped(one.host, "files", "restore", one.name) as (cli, worker):
        os.killpg(cli.pid, signal.SIGINT)
        status, _ = finished(cli)
        assert status == 130
        worker.send_signal(signal.SIGCONT)
        until(lambda: one.state == "running", 20, "the worker continues")
    one.assert_runs()
    one.host.cm_json("checkpoint", one.name)
    image = one.host.state / "sessions" / one.session / "image"
    with Pty([*CM, "restore", one.name], env=one.host.env()):
        until(image.exists, 20, "the worker is there, and at it")
    until(lambda: one.state == "running", 20, "the worker continues")
    one.assert_runs()
    one.host.cm_json("checkpoint", one.name)


def test_one_of_two_simultaneous_restores_wins(parked: dict[str, Witness]) -> None:
    one = parked["laid out"]
    runs = [
        subprocess.Popen([*CM, "--json", "restore", one.name], env=one.host.env(), stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE)
        for _ in range(3)
    ]  # fmt: skip
    ended = sorted(((status, answer) for status, answer in map(finished, runs)), key=lambda pair: pair[0])
    assert [status for status, _ in ended] == [0, 5, 5], ended
    one.assert_runs()
    one.host.cm_json("checkpoint", one.name)


def test_restore_chosen_before_another_restore_is_refused_even_if_that_session_ended(host: Host) -> None:
    """The lock is free again, and the checkpoint the same: only a second look tells."""
    one = Witness.start(host)
    host.cm_json("checkpoint", one.name)
    with stopped(host, "choose", "restore", one.name) as (late, worker):
        one.restore()
        host.cm_json("kill", one.name, "--signal", "KILL")
        worker.send_signal(signal.SIGCONT)
        status, answer = finished(late)
    assert (status, answer["error"]["code"]) == (5, "fenced"), answer


def test_ended_session_is_not_restored_before_its_agent_released_the_lease(host: Host) -> None:
    one = Witness.start(host)
    host.cm_json("checkpoint", one.name)
    one.restore()
    agent = host.agent_pid()
    assert agent is not None
    os.kill(agent, signal.SIGSTOP)
    try:
        host.cm_json("kill", one.name, "--signal", "KILL")
        error = host.fails("restore", one.name, status=5, code="fenced")
        assert "has ended" in error["message"], error
    finally:
        os.kill(agent, signal.SIGCONT)
    host.fails("restore", one.name, status=5, code="fenced")


def test_running_and_restored_already_are_fenced(host: Host) -> None:
    one = Witness.start(host)
    first = host.cm_json("checkpoint", one.name)["checkpoint"]
    one.restore()
    for reference in (one.name, one.session, first):
        error = host.fails("restore", reference, status=5, code="fenced")
        assert "--fork" in error["hint"]
    second = host.cm_json("checkpoint", one.name)["checkpoint"]
    host.fails("restore", first, status=5, code="fenced")
    assert one.restore()["checkpoint"] == second
    host.cm_json("kill", one.name, "--signal", "KILL")
    host.fails("restore", second, status=5, code="fenced")


def test_kill_during_a_restore_does_not_affect_it(parked: dict[str, Witness]) -> None:
    one = parked["laid out"]
    with stopped(one.host, "resumed", "restore", one.name) as (cli, worker):
        error = one.host.fails("kill", one.name, status=5, code="fenced")
        assert "being restored" in error["message"]
        worker.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 0, answer
    one.host.cm_json("checkpoint", one.name)


def test_program_that_exits_before_all_memory_arrived_lost_nothing(host: Host) -> None:
    code = f"import os; m = os.urandom({LARGE} << 20); print('ready', flush=True); input(); os._exit(7)"
    facts = host.start("python3", "-c", code, name="brief")
    host.wait_for("brief", "ready")
    host.cm_json("checkpoint", "brief")
    with stopped(host, "memory", "restore", "brief") as (cli, worker):
        host.cm_json("send", "brief", "go", "--enter")
        worker.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 0, answer
    until(lambda: not host.pids(facts["session"]), 20, "it ends")
    time.sleep(0.2)
    (row,) = host.sessions()
    assert row["state"] == "exited" and "exited 7" in row["note"], row
