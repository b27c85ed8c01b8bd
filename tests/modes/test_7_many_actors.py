"""Mode 7: several actors at one session."""

from __future__ import annotations

from tests.modes import record
from tests.modes.conftest import Sign
from tests.support import fenced_sessions
from tests.support.host_pair import World


def test_one_order_one_turn_and_a_seizure_that_holds(world: World, sign: Sign) -> None:
    """An agent works, a person takes over, the session moves, the agent continues when it has the turn again."""
    a, b = world.a, world.b
    session = a.start("bash", "-c", fenced_sessions.ECHO, name="w")["session"]
    a.ok("turn", "w", "request", "--actor", "agent", "--timeout", "1h")
    a.ok("send", "w", "one", "--enter", "--actor", "agent")
    record.refused(a, "send", "w", "mine", "--enter", "--actor", "bob", code="not_admitted")
    a.ok("turn", "w", "seize", "--actor", "root")
    record.refused(a, "send", "w", "but I", "--enter", "--actor", "agent", code="not_admitted")
    a.ok("send", "w", "two", "--enter", "--actor", "root")
    a.ok("migrate", "w", "--to", "host-b")
    words = record.refused(b, "send", session, "and now", "--enter", "--actor", "agent", code="not_admitted")
    b.ok("turn", session, "grant", "--actor", "root", "--to", "agent")
    b.ok("send", session, "three", "--enter", "--actor", "agent")
    b.wait_for(session, "did three")

    journal = b.cm_json("inputs", session)["inputs"]
    assert [line["seq"] for line in journal] == list(range(1, len(journal) + 1)), "one order, also across the move"
    told = [(line["actor"], line.get("turn") or line["text"], line["token"]) for line in journal]
    assert told == [
        ("agent", "request", 1),
        ("agent", "one\r", 1),
        ("root", "seize", 1),
        ("root", "two\r", 1),
        ("root", "grant", 2),
        ("agent", "three\r", 2),
    ]
    assert b.cm_json("inputs", session, "--verify")["ok"], "nothing was put in, changed or taken out"
    said = [line for line in b.output(session).splitlines() if line.startswith("did ")]
    assert said == ["did one", "did two", "did three"], "what was refused never reached it"
    turns = [(one["host"], one["do"], one["holder"]) for host in (a, b) for one in record.events(host, session, "turn")]
    assert turns == [("host-a", "request", "agent"), ("host-a", "seize", "root"), ("host-b", "grant", "agent")]
    sign(journal=told, refused=words, chain="whole")
