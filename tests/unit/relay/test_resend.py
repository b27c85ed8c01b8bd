"""The resend buffer: the actions that follow each event, and runs against holders that move, freeze and lose channels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmdop_migrate.gateway.resend import KEPT, Ended, ResendBuffer, Retry, ToClient, ToHolder
from cmdop_migrate.holder.input_streams import Streams
from cmdop_migrate.session.stream import Item, Message

ATTACH = {"op": "attach", "actor": "ann", "read_only": False, "from": None, "rows": 24, "cols": 80, "terminal": True}


def said(acts: list[Any], kind: type = ToHolder) -> list[Any]:
    found = (act.item if isinstance(act, ToClient) else act.message for act in acts if isinstance(act, kind))
    return copy.deepcopy(list(found))


def control(bridge: ResendBuffer, **message: Any) -> list[Any]:
    return bridge.from_holder(message)


def ask(bridge: ResendBuffer, **message: Any) -> list[Any]:
    return bridge.request(message)


def output(bridge: ResendBuffer, seq: int, data: bytes) -> list[Any]:
    return bridge.from_holder((seq, data))


def attached(start: int = 0) -> ResendBuffer:
    bridge = ResendBuffer(lambda: "0" * 16)
    assert ask(bridge, **ATTACH) == []
    (request,) = said(bridge.opened(1))
    assert request == {**ATTACH, "stream": "0" * 16}
    (answer,) = said(control(bridge, re="attach", start=start, end=start, applied=0, modes=[]), ToClient)
    assert answer == {"re": "attach", "start": start, "end": start, "modes": []}
    return bridge


def test_typed_bytes_are_kept_until_they_are_applied() -> None:
    bridge = attached()
    assert said(bridge.type(b"abc")) == [{"op": "type", "at": 0, "data": "abc"}]
    assert said(bridge.type(b"de")) == [{"op": "type", "at": 3, "data": "de"}]
    assert control(bridge, event="applied", at=3) == []
    bridge.closed()
    assert bridge.type(b"f") == []
    (again,) = said(bridge.opened(2))
    assert (again["op"], again["from"], again["stream"]) == ("attach", 0, "0" * 16)
    acts = control(bridge, re="attach", start=0, end=0, applied=4, modes=[])
    assert said(acts) == [{"op": "type", "at": 4, "data": "ef"}]
    assert said(acts, ToClient) == []


def test_output_resumes_at_the_next_byte() -> None:
    bridge = attached(start=100)
    assert said(output(bridge, 100, b"abc"), ToClient) == [(100, b"abc")]
    bridge.closed()
    (again,) = said(bridge.opened(2))
    assert again["from"] == 103
    assert output(bridge, 103, b"x") == [], "not before it is attached"
    control(bridge, re="attach", start=0, end=110, since=None, applied=0, modes=[])
    assert said(output(bridge, 101, b"bcd"), ToClient) == [(103, b"d")], "only what is new"


def test_lost_output_is_not_requested_again() -> None:
    bridge = attached()
    assert said(control(bridge, event="lost", bytes=50, **{"from": 0}), ToClient) == [
        {"event": "lost", "bytes": 50, "from": 0}
    ]
    bridge.closed()
    assert said(bridge.opened(1))[0]["from"] == 50


def test_requests_are_resent_until_they_are_answered() -> None:
    bridge = ResendBuffer(lambda: "0" * 16)
    assert ask(bridge, op="send", data="x", actor="ann") == []
    assert said(bridge.opened(1)) == [{"op": "send", "data": "x", "actor": "ann", "stream": "0" * 16}]
    bridge.closed()
    assert len(said(bridge.opened(1))) == 1
    acts = control(bridge, re="send", error="checkpointing")
    assert [type(act) for act in acts] == [Retry], "the session is frozen: the request is repeated in a moment"
    assert len(said(bridge.retry())) == 1
    assert said(control(bridge, re="send", seq=3, at=9), ToClient) == [{"re": "send", "seq": 3, "at": 9}]
    bridge.closed()
    assert bridge.opened(2) == []


@pytest.mark.parametrize(
    ("farewell", "is_over"),
    [
        ({"code": 0, "reason": "exited 0"}, True),
        ({"code": 137, "reason": "killed by SIGKILL"}, True),
        ({"code": None, "reason": "moved to host-b (token 2)"}, False),
        ({"code": 137, "reason": "superseded by token 3 on host-b"}, False),
        ({"code": 137, "reason": "any text", "kind": "superseded"}, False),
        ({"code": 137, "reason": "superseded, by its text only", "kind": "killed"}, True),
        ({"code": None, "reason": "parked in the store", "checkpoint": "c1"}, False),
    ],
)
def test_which_exit_events_end_the_conversation(farewell: dict[str, Any], is_over: bool) -> None:
    bridge = attached()
    acts = control(bridge, event="exit", **farewell)
    assert any(isinstance(act, Ended) for act in acts) == is_over
    assert any(event.get("event") == "exit" for event in said(acts, ToClient)) == is_over


def test_the_client_is_notified_of_a_status_once() -> None:
    bridge = attached()
    assert said(control(bridge, event="moving", to="host-b"), ToClient) == [{"event": "moving", "to": "host-b"}]
    assert bridge.relay_status("moving", None) == [], "less is known"
    bridge.closed()
    assert bridge.relay_status("routed", None) == []
    bridge.opened(2)
    acts = control(bridge, re="attach", start=0, end=0, applied=0, modes=[])
    assert said(acts, ToClient) == [{"event": "resumed"}]
    assert said(bridge.show_status({"event": "away"}), ToClient) == [{"event": "away"}]


def test_input_and_output_undone_by_a_dead_host_are_reported() -> None:
    bridge = attached()
    bridge.type(b"abcdef")
    control(bridge, event="applied", at=6)
    output(bridge, 0, b"x" * 90)
    bridge.closed()
    assert said(bridge.opened(3))[0]["token"] == 1, "the one whose output was seen last"
    acts = control(bridge, re="attach", start=0, end=200, since=40, applied=2, modes=[])
    assert said(acts, ToClient) == [{"event": "undone", "output": 50, "input": 0}]
    assert (said(acts)[0]["from"], said(acts)[0]["token"]) == (40, 3)
    assert output(bridge, 90, b"of the wrong past") == []
    acts = control(bridge, re="attach", start=0, end=200, since=None, applied=2, modes=[])
    assert said(acts, ToClient) == [{"event": "undone", "output": 0, "input": 4}]
    assert said(output(bridge, 40, b"y"), ToClient) == [(40, b"y")]
    assert said(bridge.type(b"g")) == [{"op": "type", "at": 2, "data": "g"}]
    bridge.closed()
    bridge.opened(3)
    acts = control(bridge, re="attach", error="range", start=0, end=30)
    assert said(acts, ToClient) == [{"event": "undone", "output": 11, "input": 0}]


def test_typing_of_a_read_only_client_is_refused() -> None:
    bridge = ResendBuffer(lambda: "0" * 16)
    ask(bridge, **ATTACH)
    bridge.opened(1)
    bridge.type(b"abc")
    acts = control(bridge, re="attach", start=0, end=0, modes=[])
    assert said(acts, ToClient)[1] == {"event": "refused", "bytes": 3, "why": "not_admitted"}
    assert said(acts) == [] and bridge.has_room
    assert said(bridge.type(b"d"), ToClient)[0]["bytes"] == 1


def test_terminal_size_is_sent_to_the_next_host() -> None:
    bridge = attached()
    assert said(ask(bridge, op="resize", rows=10, cols=20)) == [{"op": "resize", "rows": 10, "cols": 20}]
    bridge.closed()
    assert ask(bridge, op="resize", rows=11, cols=21) == []
    (again,) = said(bridge.opened(1))
    assert (again["rows"], again["cols"]) == (11, 21)


def test_no_room_for_input_while_too_much_is_unapplied() -> None:
    bridge = attached()
    assert bridge.has_room
    bridge.type(b"x" * KEPT)
    assert not bridge.has_room
    control(bridge, event="applied", at=10)
    assert bridge.has_room


class Session:
    """A session that prints what is typed in capitals, with the state that its holder keeps and moves."""

    def __init__(self) -> None:
        self.token = 1
        self.typed, self.printed = b"", b""
        self.streams = Streams()
        self.frozen = False

    def answer(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        if message["op"] == "attach":
            applied = self.streams.open(message["stream"])
            since = self.streams.since(message["token"]) if "token" in message else None
            return [{"re": "attach", "start": 0, "end": len(self.printed), "since": since, "applied": applied}]
        assert message["op"] == "type"
        stream, data = "0" * 16, message["data"].encode("latin-1")
        if self.frozen:
            return [{"event": "applied", "at": self.streams.open(stream)}]
        new = self.streams.new(stream, message["at"], data)
        assert new is not None, "a gap"
        self.typed += new
        self.printed += new.upper()
        return [{"event": "applied", "at": self.streams.apply(stream, len(new))}]

    def move(self) -> None:
        self.token, self.frozen = self.token + 1, False
        self.streams.begin(self.token, len(self.printed))


class Channel:
    """Messages in flight between a buffer and one incarnation."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.up: list[Message] = []
        self.down: list[Item] = []
        self.cursor: int | None = None


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("type"), st.integers(1, 6)),
        st.tuples(st.sampled_from(["up", "down"]), st.integers(1, 3)),
        st.tuples(st.sampled_from(["cut", "freeze", "move", "open"]), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(STEPS)
def test_input_and_output_exactly_once_over_broken_channels(steps: list[tuple[str, int]]) -> None:
    session, bridge = Session(), ResendBuffer(lambda: "0" * 16)
    channel: Channel | None = None
    typed, seen = b"", b""

    def do(acts: list[Any]) -> None:
        nonlocal seen
        for act in acts:
            if isinstance(act, ToHolder):
                assert channel is not None
                channel.up.append(copy.deepcopy(act.message))
            elif isinstance(act, ToClient):
                if isinstance(act.item, tuple):
                    seq, data = act.item
                    assert seq == len(seen), "once, and in order"
                    seen += data
                else:
                    assert act.item.get("event") not in ("undone", "refused", "lost"), act.item

    def connect() -> None:
        nonlocal channel
        if channel is None:
            channel = Channel(session)
            do(bridge.opened(session.token))

    def cut() -> None:
        nonlocal channel
        channel = None
        bridge.closed()

    def take_up(most: int) -> None:
        """Have the holder read up to `most` messages, and answer."""
        assert channel is not None
        for _ in range(min(most, len(channel.up))):
            message = channel.up.pop(0)
            channel.down += session.answer(message)
            if message["op"] == "attach":
                channel.cursor = message["from"] or 0
        if channel.cursor is not None and channel.cursor < len(session.printed):
            channel.down.append((channel.cursor, session.printed[channel.cursor :]))
            channel.cursor = len(session.printed)

    def take_down(most: int) -> None:
        assert channel is not None
        for _ in range(min(most, len(channel.down))):
            do(bridge.from_holder(channel.down.pop(0)))

    ask(bridge, **ATTACH)
    connect()
    for step, count in steps:
        if step == "type":
            data = bytes((len(typed) + n) % 26 + 97 for n in range(count))
            typed += data
            do(bridge.type(data))
        elif step == "up" and channel is not None:
            take_up(count)
        elif step == "down" and channel is not None:
            take_down(count)
        elif step == "cut":
            cut()
        elif step == "freeze":
            session.frozen = True
        elif step == "move":
            cut()
            session.move()
        elif step == "open":
            connect()
        assert typed.startswith(session.typed)
    cut()
    session.frozen = False
    connect()
    for _ in range(200):
        take_up(100)
        take_down(100)
    assert session.typed == typed
    assert seen == typed.upper()
