"""Several actors on one session: one writes, the others are notified; an admin can seize the turn from its holder."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cmdop_migrate.holder import protocol
from cmdop_migrate.host import input_journal, talk
from cmdop_migrate.host import turn as host_turn
from cmdop_migrate.session.holder_client import Channel
from tests.support import fenced_sessions
from tests.support.host import CM, Host, pair, until
from tests.support.pty_client import Pty


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with pair(tmp_path) as both:
        yield both


def lines(host: Host, session: str) -> list[dict[str, Any]]:
    records = fenced_sessions.records(host)
    return list(input_journal.journal(records, records.find(session)))


def turn(host: Host, session: str, do: host_turn.Do = "show", actor: str = "root", **options: Any) -> dict[str, Any]:
    return host_turn.turn(fenced_sessions.records(host), session, host_turn.TurnOptions(do, actor, **options))


def printed(host: Host, session: str) -> int:
    return talk.output(fenced_sessions.records(host), session, None).end


def status(host: Host, session: str) -> dict[str, Any]:
    with Channel(host.run / f"{session}.sock") as channel:
        return channel.ask(op="status")


def test_only_the_turn_holder_writes_and_others_are_refused(host: Host) -> None:
    session = host.start("bash", "-c", fenced_sessions.ECHO, name="w")["session"]
    assert turn(host, "w")["holder"] is None
    got = host.cm_json("turn", "w", "request", "--actor", "ann", "--timeout", "1h")
    assert (got["holder"], got["granted"]) == ("ann", True)
    error = host.fails("send", "w", "mine", "--enter", "--actor", "bob", status=12, code="not_admitted")
    assert "ann has the write turn" in error["message"] and "request --actor bob" in error["hint"]
    with Pty([*CM, "attach", "w", "--actor", "bob"], host.env()) as bob:
        bob.expect(b"[ann has the write turn]")
        for key in "nothing of this\r":
            bob.type(key)
            time.sleep(0.01)
        at = bob.expect(b"ann has the write turn: ")
        host.ok("send", "w", "hers", "--enter", "--actor", "ann")
        bob.expect(b"did hers")
        assert b"ann has the write turn" not in bob.seen[at:], "once a burst"
        assert host.cm_json("turn", "w", "request", "--actor", "bob")["place"] == 1
        host.fails("turn", "w", "release", "--actor", "cy", status=12, code="not_admitted")
        assert host.cm_json("turn", "w", "release", "--actor", "ann")["holder"] == "bob"
        bob.expect(b"[you have the write turn]")
        bob.type("his\r")
        bob.expect(b"did his")
        assert host.cm_json("turn", "w", "grant", "--to", "ann")["holder"] == "ann"
        bob.expect(b"[ann has the write turn now]")
    assert host.cm_json("turn", "w", "release", "--actor", "ann")["holder"] is None
    host.ok("send", "w", "anyone", "--enter", "--actor", "cy")
    host.wait_for("w", "did anyone")
    assert "nothing" not in host.output("w") and "mine" not in host.output("w")
    told = [(one.get("turn"), one["actor"], one.get("holder", one.get("text"))) for one in lines(host, "w")]
    assert told == [
        ("request", "ann", "ann"),
        (None, "ann", "hers\r"),
        ("release", "ann", "bob"),
        (None, "bob", "his\r"),
        ("grant", told[4][1], "ann"),
        ("release", "ann", None),
        (None, "cy", "anyone\r"),
    ]
    assert host.cm_json("inputs", "w", "--verify")["ok"]
    assert [one["do"] for one in host.events(session) if one["event"] == "turn"][:2] == ["request", "release"]
    for words, code in ((("request", "--to", "x"), 2), (("grant", "--freeze"), 2), (("grant",), 4)):
        assert host.cm("turn", "w", *words).returncode == code


def test_a_lapsed_turn_goes_to_the_waiting_actor(host: Host) -> None:
    host.start("bash", "-c", fenced_sessions.ECHO, name="w")
    host.ok("turn", "w", "request", "--actor", "ann", "--timeout", "1h")
    gone = subprocess.Popen([*CM, "turn", "w", "request", "--actor", "gone", "--wait", "1m"], env=host.env())
    until(lambda: turn(host, "w")["queue"] == ["gone"])
    gone.kill()
    gone.wait()
    until(lambda: turn(host, "w")["queue"] == [])
    host.ok("turn", "w", "request", "--actor", "ann", "--timeout", "4s")
    got = host.cm_json("turn", "w", "request", "--actor", "bob", "--wait", "30s", "--timeout", "1h")
    assert (got["holder"], got["granted"]) == ("bob", True)
    assert [one["turn"] for one in lines(host, "w") if "turn" in one] == ["request", "lapse"]
    host.fails("turn", "w", "request", "--actor", "cy", "--wait", "300ms", status=11, code="timed_out")
    assert turn(host, "w")["queue"] == []


class Flood:
    """A client that pastes without end, as fast as its input is read, and never reads."""

    def __init__(self, host: Host, session: str, actor: str) -> None:
        self.sock: socket.socket = protocol.connect(str(host.run / f"{session}.sock"), 60)
        self.sock.sendall(protocol.control({"op": "attach", "actor": actor, "from": 0}))
        self.sent, self.over = 0, False
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> Flood:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.sock.shutdown(socket.SHUT_RDWR)
        self.thread.join(10)
        self.sock.close()

    def _run(self) -> None:
        number = 0
        while not self.over:
            number += 1
            try:
                self.sent += self.sock.send(protocol.typed(b"flood %09d\r" % number * 200))
            except OSError:
                return


@pytest.mark.parametrize("reads", [True, False])
def test_seize_takes_the_turn_from_a_client_that_keeps_typing(host: Host, tmp_path: Path, reads: bool) -> None:
    (tmp_path / "shared").mkdir()
    go = tmp_path / "shared" / "go"
    idle = "" if reads else f"until [ -e {go} ]; do sleep 0.1; done; "
    program = f"stty -echo; echo ready; {idle}while read -r x; do case $x in stop*) echo did $x; esac; done"
    session = host.start("bash", "-c", program, name="w", options=("--share", str(go.parent)))["session"]
    host.wait_for("w", "ready")
    host.ok("turn", "w", "request", "--actor", "agent", "--timeout", "1h")
    with Flood(host, session, "agent") as flood:
        until(lambda: status(host, session)["input"]["waiting"] > 10_000 or (reads and flood.sent > 300_000), 30)
        got = host.cm_json("turn", "w", "seize", "--actor", "root")
        assert got["holder"] == "root" and (reads or got["dropped"])
        go.touch()
        until(lambda: status(host, session)["input"]["refused"] > 1_000_000, 30, "it goes on in vain")
        host.ok("send", "w", "\nstop", "--enter", "--actor", "root")
        host.wait_for("w", "did stop")
        assert flood.thread.is_alive()
        host.fails("send", "w", "x", "--actor", "agent", status=12, code="not_admitted")
        found = lines(host, "w")
    (seized,) = [number for number, one in enumerate(found) if one.get("turn") == "seize"]
    after = found[seized + 1 :]
    assert found[seized]["dropped"] == got["dropped"] and {one["actor"] for one in after} == {"root"}
    assert status(host, session)["input"]["dropped"] == got["dropped"]
    assert host.cm_json("inputs", "w", "--verify")["ok"]


def test_seize_with_freeze_freezes_until_released(host: Host) -> None:
    session = host.start("bash", "-c", "n=0; while :; do echo n$((n+=1)); sleep 0.05; done", name="w")["session"]
    host.wait_for("w", "n5")
    with Pty([*CM, "attach", "w", "--actor", "bob"], host.env()) as bob:
        bob.expect(b"n6")
        got = host.cm_json("turn", "w", "seize", "--actor", "root", "--freeze", "--timeout", "1s")
        bob.expect(b"[frozen: root seized the session]")
        (row,) = host.sessions()
        assert (row["state"], row["note"], got["frozen"]) == ("frozen", "seized by root", True)
        assert "frozen (seized by root)" in host.ok("ls")
        host.ok("checkpoint", "w", "--leave-running")
        end = printed(host, "w")
        time.sleep(1.5)
        assert printed(host, "w") == end, "a copy was made, its time is over: it stands still"
        assert host.cm_json("turn", "w", "release", "--actor", "root")["holder"] is None
        bob.expect(b"[resumed]")
        until(lambda: printed(host, "w") > end)
    host.ok("turn", "w", "seize", "--freeze")
    assert host.cm_json("kill", "w")["session"] == session, "frozen or not"


def test_a_seized_session_stays_frozen_after_a_fence(tmp_path: Path) -> None:
    with pair(tmp_path, ttl="2s") as (host, _):
        session = host.start("bash", "-c", "n=0; while :; do echo n$((n+=1)); sleep 0.05; done", name="w")["session"]
        host.ok("turn", "w", "seize", "--actor", "root", "--freeze")
        host.kill_agent()
        until(lambda: status(host, session)["fenced"], 10)
        host.ok("ls")  # brings an agent back
        until(lambda: not status(host, session)["fenced"], 15)
        end = printed(host, "w")
        time.sleep(0.4)
        assert printed(host, "w") == end and host.sessions()[0]["state"] == "frozen"
        host.ok("turn", "w", "release", "--actor", "root")
        until(lambda: printed(host, "w") > end)


def test_turn_queue_and_staged_input_move_with_the_session(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    session = a.start("bash", "-c", fenced_sessions.ECHO, name="w")["session"]
    a.ok("send", "w", "half ", "--actor", "ann")
    a.ok("turn", "w", "request", "--actor", "ann", "--timeout", "1h")
    a.ok("turn", "w", "request", "--actor", "bob", "--timeout", "1h")
    got = a.cm_json("turn", "w", "seize", "--actor", "root", "--freeze")
    assert got["staged"] == {"bytes": 5, "authors": ["ann"]} and got["queue"] == ["bob"]
    assert a.cm_json("plan", "w")["ok"]
    a.ok("checkpoint", "w")
    b.ok("restore", session)
    (row,) = b.sessions()
    assert (row["state"], row["note"], row["turn"]) == ("frozen", "seized by root", "root")
    b.fails("send", session, "x", "--actor", "bob", status=12, code="not_admitted")
    assert b.cm_json("turn", session, "release", "--actor", "root")["holder"] == "bob"
    b.fails("send", session, "x", "--actor", "ann", status=12, code="not_admitted")
    b.ok("send", session, "whole", "--enter", "--actor", "bob")
    b.wait_for(session, "did half whole")
    found = lines(b, session)
    assert b.cm_json("inputs", session)["inputs"] == found
    assert [one["seq"] for one in found] == list(range(1, len(found) + 1))
    assert [one["turn"] for one in found[:-1]] == ["request", "seize", "release"]
    assert (found[-1]["actor"], found[-1]["originators"], found[-1]["token"]) == ("bob", ["ann", "bob"], 2)
    assert b.cm_json("inputs", session, "--verify")["ok"]
    fork = b.cm_json("fork", session, "branch")["session"]
    assert b.cm_json("turn", fork, "show")["holder"] is None, "a branch is a session of its own"


def test_a_changed_journal_is_reported(host: Host) -> None:
    session = host.start("bash", "-c", fenced_sessions.ECHO, name="w")["session"]
    for number in range(4):
        host.ok("send", "w", f"line {number}", "--enter", "--actor", "ann")
    path = host.state / "sessions" / session / "inputs.jsonl"
    assert "4 lines, 1 to 4, whole" in host.ok("inputs", "w", "--verify")
    assert "ann: line 2" in host.ok("inputs", "w")
    good = path.read_text()
    path.write_text(good.replace("line 1", "line X"))
    done = host.cm("inputs", "w", "--verify")
    assert done.returncode == 7 and b"the line before 3 is not the one" in done.stdout
    path.write_text("".join(good.splitlines(keepends=True)[:2]))
    done = host.cm("--json", "inputs", "w", "--verify")
    assert done.returncode == 7 and json.loads(done.stdout)["breaks"][0]["seq"] is None
