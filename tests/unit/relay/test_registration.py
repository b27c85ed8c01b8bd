"""What a host registers at a relay, and the requests that each role allows."""

from __future__ import annotations

from typing import Any

import pytest

from cmdop_migrate.gateway import permissions
from cmdop_migrate.gateway.registration import Departure, SessionStatus, changes
from cmdop_migrate.holder import protocol
from cmdop_migrate.model import Exit
from cmdop_migrate.relay.backoff import Backoff


@pytest.mark.parametrize(
    ("known", "standing", "coming", "leaving"),
    [
        (None, SessionStatus("s", 1, "w", "live"), True, None),
        (1, SessionStatus("s", 1, "w", "live"), False, None),
        (1, SessionStatus("s", 2, "w", "live"), True, None),
        (None, SessionStatus("s", 1, "w", "handing"), False, None),
        (1, SessionStatus("s", 1, "w", "handing", "host-b"), False, Departure("s", 1, "moving", "host-b")),
        (1, SessionStatus("s", 1, "w", "parked"), False, Departure("s", 1, "parked")),
        (1, SessionStatus("s", 1, "w", "exited", None, Exit(0, "", 1.0, "exited")), False, Departure("s", 1, "exited")),
        (
            1,
            SessionStatus("s", 1, "w", "exited", None, Exit(None, "", 1.0, "holder_died")),
            False,
            Departure("s", 1, "parked"),
        ),
        (
            1,
            SessionStatus("s", 1, "w", "exited", None, Exit(None, "", 1.0, "moved", "b", 2)),
            False,
            Departure("s", 1, "moving", "b"),
        ),
        (
            1,
            SessionStatus("s", 1, "w", "exited", None, Exit(9, "", 1.0, "superseded", "b", 4)),
            False,
            Departure("s", 1, "moving", "b"),
        ),
        (1, None, False, Departure("s", 1, "exited")),
    ],
)
def test_changes_for_each_state_of_a_record(
    known: int | None, standing: SessionStatus | None, coming: bool, leaving: Any
) -> None:
    told = changes({} if known is None else {"s": known}, {} if standing is None else {"s": standing})
    assert told == ([standing] if coming else [], [leaving] if leaving else [])


@pytest.mark.parametrize("role", ["read", "execute", "admin", "host"])
@pytest.mark.parametrize(
    "op", ["fresh", "superseded", "doubt", "parked", "saved", "freeze", "thaw", "typeahead", "committing", "hand_over",
           "take_back", "moved", "park", "nonsense", None, 3, ["attach"]],
)  # fmt: skip
def test_no_role_may_use_the_hosts_own_requests(role: Any, op: Any) -> None:
    assert permissions.allowed_request(role, "ann", {"op": op, "token": 9}) is None


@pytest.mark.parametrize(
    ("role", "message", "passes"),
    [
        ("read", {"op": "status"}, True),
        ("read", {"op": "type", "at": 0, "data": "x"}, False),
        ("read", {"op": "send", "data": "x"}, False),
        ("read", {"op": "resize", "rows": 1, "cols": 1}, False),
        ("read", {"op": "turn", "do": "request"}, False),
        ("execute", {"op": "send", "data": "x"}, True),
        ("execute", {"op": "turn", "do": "request"}, True),
        ("execute", {"op": "kill", "signal": 9, "grace": 0}, False),
        ("admin", {"op": "turn", "do": "seize"}, True),
        ("admin", {"op": "kill", "signal": 9, "grace": 0}, True),
        ("host", {"op": "status"}, False),
    ],
)
def test_requests_allowed_to_each_role(role: Any, message: dict[str, Any], passes: bool) -> None:
    passed = permissions.allowed_request(role, "ann", {**message, "actor": "root", "admin": True})
    assert (passed is not None) == passes
    assert passed is None or (passed["actor"], passed["admin"]) == ("ann", role == "admin")


def test_the_read_role_is_attached_read_only() -> None:
    wish = {"op": "attach", "actor": "root", "read_only": False, "stream": "0" * 16, "rows": 1, "cols": 1}
    passed = permissions.allowed_request("read", "eve", wish)
    assert passed == {"op": "attach", "actor": "eve", "read_only": True, "admin": False}


def test_edges_between_frames_are_found() -> None:
    data = protocol.control({"a": 1}) + protocol.output(7, b"x" * 100) + protocol.typed(b"")
    whole = {
        len(protocol.control({"a": 1})),
        len(protocol.control({"a": 1}) + protocol.output(7, b"x" * 100)),
        len(data),
    }
    for step in (1, 3, 7, len(data)):
        edges, at = protocol.Edges(), 0
        while at < len(data):
            is_edge = edges.feed(data[at : at + step])
            at = min(len(data), at + step)
            assert is_edge == (at in whole), at


def test_backoff_grows_and_is_bounded() -> None:
    backoff = Backoff(0.1, 1.0)
    pauses = [backoff.failed() for _ in range(10)]
    assert all(0.05 <= pause <= 1.0 for pause in pauses) and max(pauses[4:]) > 0.4
    backoff.worked()
    assert backoff.failed() <= 0.1
