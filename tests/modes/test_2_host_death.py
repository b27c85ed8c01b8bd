"""Mode 2: the host must go, or dies."""

from __future__ import annotations

import shutil

from tests.modes import record
from tests.modes.conftest import Sign
from tests.support import fenced_sessions
from tests.support.host_pair import World


def test_moved_then_its_host_dies(world: World, sign: Sign) -> None:
    """One identity on three incarnations: started on A, moved to B, restored on A when B died."""
    a, b = world.a, world.b
    session = fenced_sessions.counter(a)
    move = a.cm_json("migrate", "w", "--to", "host-b")
    moved = record.one(a, session, "migrated")
    assert (moved["to"], moved["token"]) == ("host-b", 2) == (move["to"], move["token"])
    assert {"freeze", "dump", "upload", "commit", "there.restore"} <= set(moved["phases"]), "latency by phase"
    there = record.one(b, session, "restored")
    assert (there["host"], there["token"]) == ("host-b", 2)
    fenced_sessions.counts_on(b, session)

    saved = b.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    at = len(fenced_sessions.numbers(b, session))
    fenced_sessions.die(b, session)
    record.refused(a, "restore", session, code="fenced")  # it may still run: no host knows that it died
    back = a.cm_json("restore", session, "--wait", "60s")
    assert (back["session"], back["host"], back["token"], back["checkpoint"]) == (session, "host-a", 3, saved)
    assert fenced_sessions.counts_on(a, session) >= at - 10, "from the checkpoint on; what came after it died with B"
    again = record.one(a, session, "restored")
    assert {"fetch", "lease", "restore"} <= set(again["phases"]) and again["token"] == 3
    shutil.rmtree(b.run)  # B boots again
    (row,) = b.sessions()
    assert row["state"] == "exited" and "holder died" in row["note"] and not b.pids(session)
    assert record.one(b, session, "holder_lost")["token"] == 2
    sign(
        identity=session,
        tokens=[1, moved["token"], again["token"]],
        hosts=["host-a", moved["to"], again["host"]],
        move={"frozen_s": moved["frozen_s"], "downtime_s": moved["downtime_s"]},
        restore={name: round(took, 3) for name, took in again["phases"].items()},
    )


def test_without_a_checkpoint_identity_and_record_are_all_that_is_left(world: World, sign: Sign) -> None:
    a = world.a
    session = fenced_sessions.counter(a, "gone")
    fenced_sessions.die(a, session)
    shutil.rmtree(a.run)
    (row,) = [one for one in a.sessions() if one["session"] == session]
    assert row["state"] == "exited" and "holder died" in row["note"]
    words = record.refused(a, "restore", session, code="checkpoint_not_found")
    lost = record.one(a, session, "holder_lost")
    assert (lost["name"], lost["token"]) == ("gone", 1)
    sign(left=row["note"], answer=words)
