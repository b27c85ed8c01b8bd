"""Mode 9: abandoned sessions."""

from __future__ import annotations

from tests.modes import record
from tests.modes.conftest import Sign
from tests.support import fenced_sessions
from tests.support.host import Host, until

THRESHOLD = 4.0


def test_idle_sessions_are_parked_and_can_be_restored(quick: Host, sign: Sign) -> None:
    idle = [quick.start("bash", "-c", fenced_sessions.ECHO, name=f"idle-{number}")["session"] for number in range(3)]
    busy = fenced_sessions.counter(quick, "busy")
    until(lambda: record.figure(quick, "idle_seconds_max") > THRESHOLD, 30, "the agent's figure tells")
    before = record.figure(quick, "idle_seconds_max")
    until(lambda: all(row["idle_s"] > THRESHOLD for row in quick.sessions() if row["session"] in idle), 20, "all three")
    done = quick.cm_json("reap", "--idle", f"{THRESHOLD:g}s")
    assert {one["session"] for one in done["reaped"]} == set(idle) and not done["failed"]
    for session in idle:
        event = record.one(quick, session, "reaped")
        assert event["how"] == "parked" and event["idle_s"] >= THRESHOLD and event["checkpoint"]
        assert not quick.pids(session)
    until(lambda: record.figure(quick, "sessions") == 1, 10, "only what is used runs")
    until(lambda: record.figure(quick, "idle_seconds_max") < THRESHOLD, 30, "none is idle for longer than was allowed")
    fenced_sessions.counts_on(quick, busy)
    quick.ok("restore", "idle-0")
    quick.ok("send", "idle-0", "again", "--enter")
    quick.wait_for("idle-0", "did again")
    sign(
        reaped=[f"{one['name']} after {one['idle_s']} s" for one in done["reaped"]],
        idle_seconds_max=[before, record.figure(quick, "idle_seconds_max")],
        running=["busy"],
    )
