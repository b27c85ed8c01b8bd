"""How a session's last move went, as its source tells it and listings show it."""

from __future__ import annotations

from typing import Any

import pytest

from cmdop_migrate.relay.frames import Kind, with_table
from cmdop_migrate.relay.router.router_events import End, Limits
from tests.unit.relay.router_board import S1, Board, frames

FACTS: dict[str, Any] = {"to": "host-b", "at": 12.5, "frozen_s": 0.2, "downtime_s": None, "phases": {"dump": 0.1}}


def tell(board: Board, conn: int, token: int = 2, session: str = S1, **changed: Any) -> list[Any]:
    return board.hear(conn, with_table(Kind.MOVED, {**FACTS, **changed}, session, token))


def listed(board: Board, client: int) -> Any:
    (frame,) = frames(board.hear(client, with_table(Kind.LIST, {})), client, Kind.LISTING)
    return frame.table()["sessions"][0]["moved"]


def test_listing_has_the_last_move_in_any_order_of_reports() -> None:
    board = Board()
    a, b, client = board.host("host-a"), board.host("host-b"), board.client()
    assert tell(board, a) == []  # the relay is new, and has not heard of the session yet
    board.routed(b, "host-b", token=2)
    assert listed(board, client) == {"from": "host-a", "token": 2, **FACTS}
    tell(board, b, token=3, to="host-a")
    tell(board, a, token=2)  # of before
    assert (listed(board, client)["from"], listed(board, client)["token"]) == ("host-b", 3)


def test_listing_of_a_session_that_never_moved() -> None:
    board = Board()
    a, client = board.host(), board.client()
    board.routed(a)
    assert listed(board, client) is None


@pytest.mark.parametrize(
    "changed",
    [{"phases": []}, {"phases": {"dump": "long"}}, {"phases": {"dump": True}}, {"at": "now"}, {"frozen_s": "0.1"},
     {"to": None}, {"phases": {f"p{n}": 0.123456 for n in range(500)}}],
)  # fmt: skip
def test_an_invalid_move_ends_the_connection(changed: dict[str, Any]) -> None:
    board = Board()
    assert isinstance(tell(board, board.host(), **changed)[0], End)


def test_only_hosts_report_moves_and_their_number_is_bounded() -> None:
    board = Board(Limits(remembered=2))
    host, client = board.host(), board.client()
    assert isinstance(tell(board, client)[0], End)
    assert isinstance(tell(board, host, session="")[0], End)
    host = board.host()
    for number in range(1, 5):
        assert tell(board, host, session=f"{number:024x}") == []
    assert len(board.board._moved) == 2
