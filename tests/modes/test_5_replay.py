"""Mode 5: replay divergence cannot happen: nothing is replayed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.modes import record
from tests.modes.conftest import Sign
from tests.support.host import PROJECT, Host
from tests.support.host_pair import World

# Every source of divergence a replay stumbles over: randomness, clocks, pids, and effects that would happen twice.
PROGRAM = """
import os, random, sys, time
state = (random.random(), time.time(), os.urandom(8).hex(), os.getpid())
with open(sys.argv[1] + "/effects", "a") as log: print(state, file=log)
print("ready", flush=True)
for number, line in enumerate(sys.stdin, 1): print("state", number, hash(state), flush=True)
"""
PAGE = PROJECT / "docs/modes/5-replay.md"


def test_state_is_moved_not_made_again(world: World, tmp_path: Path, sign: Sign) -> None:
    a, b = world.a, world.b
    session = a.start(sys.executable, "-c", PROGRAM, str(tmp_path), name="w", options=("--share", str(tmp_path)))[
        "session"
    ]
    a.wait_for("w", "ready")
    states = [ask(a, session, 1)]
    first = a.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    a.ok("migrate", "w", "--to", "host-b")
    states.append(ask(b, session, 2))
    words = record.refused(a, "restore", first, code="fenced")
    assert "has a newer checkpoint" in words, "no way back for this identity …"
    assert len(set(states)) == 1, "the same state, though nothing of it could be computed again"
    assert len((tmp_path / "effects").read_text().splitlines()) == 1, "what was done once was done once"
    a.ok("restore", first, "--fork", "past")
    assert ask(a, "past", 2) == states[0], "… a checkpoint can be branched, as it was then"

    seen = record.phases(a, b)
    named = {re.sub(r"^there\.|_\d+$", "", name) for names in seen.values() for name in names}
    assert {"checkpointed", "restored", "migrated"} <= set(seen)
    assert named <= listed(), f"not in {PAGE.name}: {named - listed()}"
    sign(effects=1, state=states[0], phases=sorted(named))


def test_no_code_has_a_phase_that_replays() -> None:
    """Search the code too: it may have a phase that no recorded trace contains."""
    code = "".join(path.read_text() for path in (PROJECT / "cmdop_migrate").rglob("*.py"))
    named = {name.rstrip("_") for name in re.findall(r'\.phase\(f?"(\w+)', code)}
    assert len(named) > 20 and named == listed()
    assert not [name for name in named if re.search("replay|again|re_?(execute|run|do)", name)]


def listed() -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M))


def ask(host: Host, session: str, number: int) -> str:
    host.ok("send", session, "?", "--enter")
    return str(host.wait_for(session, rf"state {number} (-?\d+)\r?\n")["matched"]).split()[2]
