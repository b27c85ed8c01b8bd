"""Check that `plan` finds each state that blocks a dump or a move, planted one at a time, without freezing the
session."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate.holder import cgroup
from cmdop_migrate.preflight.facts import cpu
from cmdop_migrate.util.faults import TEST_FACTS
from tests.support.host import Host, a_host, until
from tests.support.plan_session import Counting, Unfrozen, blocks, said

MIB = 1 << 20
PYTHON = sys.executable


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with a_host(tmp_path_factory.mktemp("plan")) as one:
        yield one


@pytest.fixture(scope="module")
def counting(here: Host) -> Iterator[Counting]:
    with Counting(here) as one:
        yield one


def facts(tmp_path: Path, **changes: object) -> dict[str, str]:
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(changes))
    return {TEST_FACTS: str(file)}


def test_quiet_session_can_move_and_its_cost_is_shown_once_measured(here: Host, counting: Counting) -> None:
    answer = counting.plan()
    assert answer["ok"] and (answer["from"], answer["to"]) == (here.name, here.name)
    assert "not measured yet" in said(answer, "expected")[0][1] and answer["expected"] is None
    here.ok("checkpoint", counting.name, "--leave-running")
    counting.allow_freeze()
    answer = counting.plan()
    assert "its own last checkpoint" in said(answer, "expected")[0][1]
    assert answer["expected"]["frozen_s"] > 0 and answer["bytes"]["memory"] > 0


def test_plan_prints_a_table_with_fixes(here: Host, counting: Counting, tmp_path: Path) -> None:
    done = here.cm("plan", counting.name, env=facts(tmp_path, instance="b-1", host="host-b", kernel="5.10.0"))
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 4 and done.stderr == b""
    assert lines[0].split() == ["CHECK", "LEVEL", "WHAT"] and lines[1].split()[:2] == ["kernel", "block"]
    assert any(line.startswith("kernel: ") for line in lines)
    assert lines[-1] == "t from host-t to host-b: cannot move: 1 blocker"


@pytest.mark.parametrize(
    ("check", "names", "changes"),
    [
        ("kernel", "5.10.0-9", {"kernel": "5.10.0-9-amd64"}),
        ("disk", "1.0 MiB free", {"disk_free": MIB}),
        ("memory", "1.0 MiB", {"memory_available": MIB}),
        ("host_ready", "no CRIU", {"needs": [{"name": "criu", "message": "no CRIU", "fix": "x", "fatal": True}]}),
        ("lease_there", "no route", {"lease": {"trouble": "no route"}}),
        ("store_there", "another store", {"store": {"id": "other"}}),
    ],
)
def test_missing_features_of_the_other_host_block(
    counting: Counting, tmp_path: Path, check: str, names: str, changes: dict[str, object]
) -> None:
    keyed = counting.host.cm_json("key", "show")["fingerprint"]
    env = facts(tmp_path, instance="b-1", host="host-b", keys=[keyed], **changes)
    blocks(counting.plan(env=env), check, names)


def test_a_masked_processor_flag_blocks_unless_accepted(counting: Counting, tmp_path: Path) -> None:
    own = cpu.read()
    flag = min(cpu.for_programs(own))
    kept = sorted(own.flags - {flag})
    keyed = counting.host.cm_json("key", "show")["fingerprint"]
    env = facts(tmp_path, instance="b-1", host="host-b", keys=[keyed], cpu={"flags": kept})
    answer = counting.plan(env=env)
    blocks(answer, "cpu", flag)
    accepted = counting.plan("--accept", "cpu", env=env)
    assert accepted["ok"] and said(accepted, "cpu")[0][0] == "warn"


URING = (
    f"{PYTHON} -c 'import ctypes, time; b = ctypes.create_string_buffer(120);"
    ' fd = ctypes.CDLL(None).syscall(425, 8, b); assert fd > 0; print("ready", flush=True); time.sleep(1000)\''
)
TRACED = (
    f"{PYTHON} -c 'import ctypes, os, time; pid = os.fork() or time.sleep(1000);"
    ' assert ctypes.CDLL(None).ptrace(0x4206, pid, 0, 0) == 0; print("ready", flush=True); time.sleep(1000)\''
)


@pytest.mark.parametrize(
    ("check", "names", "script"),
    [
        ("io_uring", "io_uring", URING),
        ("traced", "traced", TRACED),
        (
            "sockets",
            "AF_VSOCK",
            f"{PYTHON} -c 'import socket, time; s = socket.socket(socket.AF_VSOCK, 1, 0);"
            ' print("ready", flush=True); time.sleep(1000)\'',
        ),
        (
            "devices",
            "/root/dev",
            "{ mknod /root/dev c 10 229; exec 3< /root/dev; rm /root/dev; echo ready; sleep 1000; }",
        ),
        ("pid_namespace", "pid namespace", "unshare --pid --fork sh -c 'echo ready; exec sleep 1000'"),
    ],
)
def test_undumpable_state_blocks_in_plan_and_in_checkpoint(here: Host, check: str, names: str, script: str) -> None:
    with Counting(here, script, name=check) as session:
        here.wait_for(check, "ready")
        answer = session.plan()
        blocks(answer, check, names)
        refused = here.fails("checkpoint", check, status=4, code="blocked")
        finding = answer["findings"][0]
        assert (refused["message"], refused["hint"]) == (finding["message"], finding["fix"])
        assert not session.unfrozen.changed(), "checkpoint froze it"


def test_connections_to_the_outside_are_reported(here: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"{{ exec 3<>/dev/tcp/127.0.0.1/{port}; echo ready; sleep 1000; }}"
        with Counting(here, script, name="out", options=("--net", "host")) as session:
            here.wait_for("out", "ready")
            answer = session.plan()
            assert answer["ok"]
            ((level, message),) = said(answer, "connections")
            assert level == "warn" and f"127.0.0.1:{port}" in message


def test_the_witness_sees_a_freeze(here: Host, counting: Counting) -> None:
    group = here.group(counting.session)
    witness = Unfrozen(group)
    try:
        assert not witness.changed()
        cgroup.freeze(group)
        cgroup.thaw(group)
        assert until(witness.changed, 5)
    finally:
        witness.close()
        cgroup.thaw(group)
        counting.allow_freeze()


def test_bad_input(here: Host, counting: Counting, tmp_path: Path) -> None:
    here.fails("plan", "nobody", status=3, code="session_not_found")
    here.fails("plan", counting.name, "--to", "nowhere", status=3, code="host_not_found")
    here.start("true", name="over")
    until(lambda: any(one["name"] == "over" and one["state"] == "exited" for one in here.sessions()), 10, "it ends")
    here.fails("plan", "over", status=4, code="session_exited")
    here.fails("plan", counting.name, "--accept", "nothing", status=2, code="usage")
    ask = tmp_path / "ask.json"
    ask.write_text("[]")
    here.fails("facts", "--for", str(ask), status=2, code="usage")


DATABASES = """
import sqlite3, time
kept = []
for path, mode in (("/root/plain.db", "delete"), ("/root/wal.db", "wal"), ("/srv/shared.db", "delete")):
    kept.append(sqlite3.connect(path))
    kept[-1].execute(f"pragma journal_mode={mode}")
    kept[-1].execute("create table t (n)")
    kept[-1].commit()
reading = sqlite3.connect("file:/root/plain.db?mode=ro", uri=True)
print("open", flush=True)
time.sleep(600)
"""


def test_sqlite_rollback_journal_is_reported_and_fails_after_a_move(here: Host, tmp_path: Path) -> None:
    """Check that the warning is true, and that it does not apply to WAL mode and to a shared directory."""
    shared = tmp_path / "srv"
    shared.mkdir()
    program = DATABASES.replace("/srv", str(shared)).replace(
        "time.sleep(600)",
        "input()\n"
        "for one in kept:\n"
        "    try: one.execute('insert into t values (1)'); one.commit(); print('wrote', flush=True)\n"
        "    except sqlite3.OperationalError as error: print('refused:', error, flush=True)\n"
        "time.sleep(600)",
    )
    session = here.start(PYTHON, "-c", program, name="db", options=("--share", str(shared)))["session"]
    try:
        here.wait_for("db", "open")
        answer = here.cm_json("plan", "db")
        ((level, message),) = said(answer, "databases")
        assert answer["ok"] and level == "warn"
        assert "/root/plain.db" in message and "wal.db" not in message and "shared.db" not in message
        here.ok("checkpoint", "db")
        here.ok("restore", session)
        here.ok("send", session, "", "--enter")
        here.wait_for(session, r"wrote\s+wrote")
        assert "refused: attempt to write a readonly database" in here.output(session)
    finally:
        here.ok("kill", session, "--signal", "KILL")
