"""Numbered input at a real holder: sent twice it goes in once, frozen it is not acknowledged, and all of it travels."""

from __future__ import annotations

from typing import Any

from cmdop_migrate.session.holder_client import Channel
from tests.support.host import Host, until

STREAM = "0123456789abcdef"


def attach(channel: Channel, stream: str = STREAM) -> int:
    applied = channel.ask(op="attach", actor="ann", read_only=False, stream=stream, **{"from": None})["applied"]
    assert isinstance(applied, int)
    return applied


def type_at(channel: Channel, at: int, data: str) -> dict[str, Any]:
    channel.send({"op": "type", "at": at, "data": data})
    for message in channel.follow(10):
        if isinstance(message, dict) and message.get("event") in ("applied", "refused"):
            return message
    raise AssertionError("no answer")


def test_numbered_input_is_applied_once_across_a_move(host: Host) -> None:
    session = host.start("bash", "-c", "stty -echo; echo ready; while read -r x; do echo got $x; done", name="w")[
        "session"
    ]
    host.wait_for("w", "ready")
    path = host.run / f"{session}.sock"
    with Channel(path) as channel:
        assert attach(channel) == 0
        assert type_at(channel, 0, "one\n") == {"event": "applied", "at": 4}
        assert type_at(channel, 2, "e\ntwo\n") == {"event": "applied", "at": 8}
        assert type_at(channel, 9, "no\n") == {"event": "refused", "bytes": 3, "why": "gap", "at": 8}
        assert type_at(channel, 0, "one\ntwo\nthr") == {"event": "applied", "at": 11}
        with Channel(path) as freezer:
            assert freezer.ask(op="freeze")["streams"]["applied"] == {STREAM: [11, 0, 0]}
            assert type_at(channel, 11, "ee\n") == {"event": "applied", "at": 11}, "it stands still"
        # The client that froze the session disconnected: the session resumes, and the held-back input is applied.
        assert next(one for one in channel.follow(10) if isinstance(one, dict)) == {"event": "applied", "at": 14}
    host.wait_for("w", "^got three")
    with Channel(path) as again:
        assert attach(again) == 14
        assert type_at(again, 8, "three\nfo")["at"] == 16
    host.ok("checkpoint", "w")
    host.ok("restore", "w")
    with Channel(path) as there:
        assert attach(there) == 16
        assert type_at(there, 11, "ee\nfour\n")["at"] == 19
        assert attach(there, "f" * 16) == 0
        sent = {"op": "send", "data": "five\n", "actor": "ann", "stream": "e" * 16}
        first = there.ask(**sent)
        assert there.ask(**sent) == first, "answered again, not sent again"
    until(lambda: "got five" in host.output("w"), 10)
    lines = [line for line in host.output("w").splitlines() if line.startswith("got")]
    assert lines == ["got one", "got two", "got three", "got four", "got five"]
