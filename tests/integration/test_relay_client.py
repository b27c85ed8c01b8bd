"""Clients of sessions through a real relay: attach, send, output, wait, ls; and who may do what."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cmdop_migrate.errors import NotAdmitted
from cmdop_migrate.gateway.relay_channel import RelayStream
from cmdop_migrate.session.holder_client import HolderGone
from tests.support.host import CM
from tests.support.relayed_hosts import Linked, linked


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    with linked(tmp_path_factory.mktemp("linked")) as made:
        yield made


def test_send_output_wait(world: Linked) -> None:
    file = world.credential()
    session = world.a.start("bash", "--norc", name="talk")["session"]
    world.routed(session, file)
    sent = world.client_json(file, "send", "talk", "echo $((6*7))", "--enter")
    found = world.client_json(file, "wait", "talk", "--for", "^42", "--from", str(sent["at"]))
    assert found["matched"] == "42"
    assert "42" in world.client_json(file, "output", session)["data"]


def test_attach_type_detach(world: Linked, tmp_path: Path) -> None:
    file = world.credential()
    session = world.a.start("bash", "--norc", name="term")["session"]
    world.routed(session, file)
    with world.attach(file, "term") as pty:
        pty.expect(b"# ")
        pty.type("echo so-$((1+1))\r")
        pty.expect(b"so-2")
        pty.type(b"\x1cd")
        assert pty.wait() == 0
        assert b"detached from term" in pty.seen
        assert pty.is_sane()
    assert world.a.pids(session)


def test_read_role_cannot_type(world: Linked) -> None:
    file, other = world.credential("read", actor="eve"), world.credential()
    session = world.a.start("bash", "--norc", name="ro")["session"]
    world.routed(session, file)
    done = world.client(file, "send", "ro", "touch /tmp/x", "--enter", "--json")
    assert done.returncode == 12 and json.loads(done.stdout)["error"]["code"] == "not_admitted", done
    with world.line(file, session) as line:
        line.channel.ask(op="attach", actor="root", read_only=False, **{"from": None})
        line.channel.type(b"echo typed-by-eve\r")
        for op in ("freeze", "park", "fresh", "superseded", "hand_over", "kill"):
            assert line.channel.ask(op=op, token=99, host="x", checkpoint="c", signal=9, grace=0) == {
                "re": op, "error": "not_admitted"
            }  # fmt: skip
    world.client_json(other, "send", "ro", "echo last", "--enter")
    world.client_json(other, "wait", "ro", "--for", "^last")
    assert "typed-by-eve" not in world.a.output("ro") and world.a.pids(session)


def test_a_credential_covers_only_its_sessions(world: Linked) -> None:
    session = world.a.start("sleep", "1000", name="secret")["session"]
    file, other = world.credential(sessions="talk*"), world.credential()
    world.routed(session, other)
    assert session not in [one["session"] for one in world.client_json(file, "ls")["sessions"]]
    for reference in (session, "ab" * 12, "secret"):
        done = world.client(file, "output", reference, "--json")
        assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (3, "session_not_found"), done


def test_revoking_a_credential_ends_its_channel(world: Linked) -> None:
    file = world.credential(actor="bob")
    session = world.a.start("sleep", "1000", name="out")["session"]
    world.routed(session, file)
    with world.line(file, session) as line:
        assert "error" not in line.channel.ask(op="attach", actor="x", read_only=True, **{"from": None})
        (row,) = [one for one in world.a.cm_json("relay", "token", "ls")["tokens"] if one["name"] == "bob"]
        world.a.ok("relay", "token", "revoke", row["id"])
        with pytest.raises(HolderGone):
            for _ in line.channel.follow(20):
                pass
        assert isinstance(line.failure, NotAdmitted) and "revoked" in line.failure.message, line.failure


def test_a_slow_client_is_notified_of_lost_output_and_delays_no_other(world: Linked) -> None:
    file = world.credential()
    flood = (
        "import sys, time; time.sleep(2)\nfor n in range(400000): print(f'line {n:06d} ' + 'x' * 40)\ntime.sleep(1000)"
    )
    session = world.a.start("python3", "-c", flood, name="flood")["session"]
    world.routed(session, file)
    with world.line(file, session) as slow, world.line(file, session) as quick:
        for line in (slow, quick):
            line.channel.ask(op="attach", actor="x", read_only=True, **{"from": 0})
        seen, lost = 0, 0
        for message in quick.channel.follow(60):
            if isinstance(message, dict):
                lost += message.get("bytes", 0)
                continue
            seen = message[0] + len(message[1])
            if b"line 399999" in message[1]:
                break
        assert seen > 20 << 20
        at, missed = 0, 0
        for message in slow.channel.follow(30):  # has read nothing so far
            if isinstance(message, tuple):
                assert message[0] == at, "one piece after the other"
                at += len(message[1])
            elif message.get("event") == "lost":
                assert message["from"] == at
                missed += message["bytes"]
                at += message["bytes"]
            if at >= seen:
                break
        assert missed > 10 << 20, "most of it"
        print(f"quick lost {lost}, slow lost {missed} of {seen}")


def test_exit_event_reaches_relay_clients(world: Linked) -> None:
    file = world.credential()
    session = world.a.start("sh", "-c", "read line; echo bye; exit 3", name="brief")["session"]
    world.routed(session, file)
    with world.attach(file, "brief") as pty:
        pty.type("go\r")
        assert pty.wait() == 0
        assert b"bye" in pty.seen and b"[brief: exited 3]" in pty.seen
    world.a.start("sh", "-c", "read line; exit 4", name="brief2")
    with world.line(file, session):
        pass
    done = world.client(file, "send", session, "x", "--json")
    assert json.loads(done.stdout)["error"]["code"] in ("session_exited", "session_not_found"), done


def test_a_relay_client_needs_no_root(world: Linked, tmp_path: Path) -> None:
    """Not root, nothing but the package and a credential."""
    session = world.a.start("bash", "--norc", name="plain")["session"]
    file = world.credential()
    world.routed(session, file)
    own = Path(tempfile.mkdtemp(prefix="cm-client-"))
    try:
        copy = own / "credential"
        copy.write_bytes(file.read_bytes())
        for path in (own, copy):
            os.chown(path, 65534, 65534)
        # It may read the files of this Python, wherever they are, and has no other right.
        caps = "-all,+dac_read_search"
        user = [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            f"--inh-caps={caps}",
            f"--ambient-caps={caps}",
        ]
        env = world.env() | {"CMDOP_MIGRATE_RELAY_CREDENTIAL": str(copy), "CMDOP_MIGRATE_STATE_DIR": "/nonexistent"}
        words = [*user, *CM, "send", "plain", "echo me-$((2+3))", "--enter", "--json"]
        done = subprocess.run(words, env=env, capture_output=True, timeout=60, check=False, cwd="/")
        assert done.returncode == 0, done
        world.client_json(file, "wait", "plain", "--for", "^me-5")
    finally:
        shutil.rmtree(own)


def test_write_turn_through_the_relay(world: Linked) -> None:
    """The actor is the one in the credential; a client cannot choose another."""
    ann, bob, eve, root = (
        world.credential(role, actor=name)
        for name, role in (("ann", "execute"), ("bob", "execute"), ("eve", "read"), ("carol", "admin"))
    )
    session = world.a.start("bash", "--norc", name="turns")["session"]
    world.routed(session, ann)
    assert world.client_json(ann, "turn", "turns", "request", "--actor", "root")["holder"] == "ann"
    done = world.client(bob, "send", "turns", "echo no", "--enter", "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (12, "not_admitted"), done
    for file, do in ((bob, "seize"), (eve, "request"), (bob, "grant")):
        done = world.client(file, "turn", "turns", do, "--json")
        assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (12, "not_admitted"), done
    with world.line(ann, session) as line:
        line.channel.ask(op="attach", actor="x", read_only=False, **{"from": None})
        assert world.client_json(root, "turn", "turns", "seize")["holder"] == "carol"
        line.channel.type(b"echo in-vain\r")
        events = [one for one in _events(line) if one["event"] == "refused"]
        assert events[0]["why"] == "turn" and events[0]["bytes"] == len(b"echo in-vain\r"), events
    assert world.client_json(root, "turn", "turns", "release")["holder"] is None
    world.client_json(bob, "send", "turns", "echo at-last", "--enter")
    world.client_json(bob, "wait", "turns", "--for", "^at-last")
    actors = [one["actor"] for one in world.a.cm_json("inputs", "turns")["inputs"] if "turn" not in one]
    assert actors == ["bob"], actors


def _events(line: RelayStream) -> Iterator[dict[str, Any]]:
    for message in line.channel.follow(10):
        if isinstance(message, dict) and "event" in message:
            yield message
            if message["event"] == "refused":
                return
