"""Mode 8: one writes a line, another, who may, is made to press Enter."""

from __future__ import annotations

import json
from pathlib import Path

from tests.modes import record
from tests.modes.conftest import Sign
from tests.support import fenced_sessions
from tests.support.host_pair import World

# Whose bytes are in it counts, not who pressed Enter.
GATE = """#!/bin/sh
read -r question
printf '%s\\n' "$question" >> "$(dirname "$0")/asked"
case $question in *'"mallory"'*) echo "mallory has a hand in it"; exit 1;; esac
"""


def test_a_staged_line_keeps_its_authors(world: World, tmp_path: Path, sign: Sign) -> None:
    a, b = world.a, world.b
    gate = tmp_path / "gate"
    gate.write_text(GATE)
    gate.chmod(0o755)
    session = a.start("bash", "-c", fenced_sessions.ECHO, name="w", options=("--gate", str(gate)))["session"]
    a.ok("send", "w", "own work", "--enter", "--actor", "ann")
    a.wait_for("w", "did own work")
    a.ok("send", "w", "give mallory ", "--actor", "mallory")
    a.ok("migrate", "w", "--to", "host-b")  # the half line and whose it is go along
    words = record.refused(b, "send", session, "everything", "--enter", "--actor", "ann", code="not_admitted")
    assert "mallory has a hand in it" in words
    b.ok("send", session, "more of her own", "--enter", "--actor", "ann")
    b.wait_for(session, "did more of her own")

    journal = b.cm_json("inputs", session)["inputs"]
    decisions = [(line["gate"], line["actor"], line["originators"], line.get("why")) for line in journal]
    assert decisions == [
        ("allowed", "ann", ["ann"], None),
        ("refused", "ann", ["mallory", "ann"], "mallory has a hand in it"),
        ("allowed", "ann", ["ann"], None),
    ]
    event = record.one(b, session, "gate_refused")
    assert (event["actor"], event["originators"], event["allowed"]) == ("ann", ["mallory", "ann"], False)
    assert "everything" not in json.dumps(event), "what was typed is for the journal alone"
    asked = [json.loads(line)["originators"] for line in (tmp_path / "asked").read_text().splitlines()]
    assert asked == [["ann"], ["mallory", "ann"], ["ann"]], "asked before it commits, with all whose bytes are in it"
    assert "did give" not in b.output(session)
    assert b.cm_json("inputs", session, "--verify")["ok"]
    sign(journal=decisions, event={key: event[key] for key in ("event", "actor", "originators", "why")})
