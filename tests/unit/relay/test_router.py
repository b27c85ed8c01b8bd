"""The router: the actions that follow each event."""

from __future__ import annotations

import pytest

from cmdop_migrate.relay.frames import PAYLOAD_MAX, Frame, Kind, encode, with_credit, with_table
from cmdop_migrate.relay.router.router_events import Answered, Ask, Keep, LeaseStatus, Limits, NotKept, Ticked
from tests.unit.relay.router_board import S1, S2, Board, frames, held, said


def test_registration_is_routed_once_the_lease_store_confirms() -> None:
    board = Board()
    host = board.host()
    assert board.register(host) == [Ask(S1, False)]
    actions = board.answer(S1, held())
    assert said(actions, host) == [("REGISTERED", "")]
    assert Keep(S1, "work") in actions
    assert said(board.register(host, state="frozen"), host) == [("REGISTERED", "")]  # the same again: news of it


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("unknown", "not_confirmed"),
        ("silent", "unavailable"),
        (held("host-b"), "not_confirmed"),
        (held(token=3), "fenced"),
        (held(token=1), "not_confirmed"),
        (LeaseStatus(2, "parked", "host-a", 15.0), "not_confirmed"),
        (LeaseStatus(2, "free", "host-a", 15.0, over=True), "not_confirmed"),
    ],
)
def test_a_registration_that_is_not_confirmed_is_refused(answer: object, code: str) -> None:
    board = Board()
    host, client = board.host(), board.client()
    board.register(host, token=2)
    assert said(board.answer(S1, answer), host) == [("REFUSED", code)]  # type: ignore[arg-type]
    assert isinstance(board.open(client)[0], Ask)  # it leads nowhere


def test_a_lower_token_is_refused_without_asking() -> None:
    board = Board()
    a, b = board.host("host-a"), board.host("host-b")
    board.routed(b, "host-b", token=5)
    assert said(board.register(a, token=4), a) == [("REFUSED", "fenced")]


def test_a_higher_token_replaces_the_route_once_confirmed() -> None:
    board = Board()
    a, b, client = board.host("host-a"), board.host("host-b"), board.client()
    board.routed(a, "host-a", token=1)
    board.open(client)
    board.register(b, token=2)
    assert said(board.open(client, channel=2), client) == [("STATUS", "routed")]  # not yet
    actions = board.answer(S1, held("host-b", 2))
    assert said(actions, client) == [("CLOSE", "moved"), ("CLOSE", "moved")]
    assert said(actions, a) == [("CLOSE", "moved"), ("CLOSE", "moved"), ("REFUSED", "fenced")]
    assert said(actions, b) == [("REGISTERED", "")]
    again = board.open(client, channel=3)
    assert (said(again, client), said(again, b)) == ([("STATUS", "routed")], [("OPEN", "")])
    assert frames(again, b, Kind.OPEN)[0].token == 2


def test_a_host_that_reconnects_keeps_its_sessions() -> None:
    board = Board()
    old, new, client = board.host(), board.host(), board.client()
    board.routed(old)
    board.open(client)
    actions = board.routed(new)
    assert said(actions, client) == [("CLOSE", "lost")] and said(actions, new) == [("REGISTERED", "")]
    assert board.gone(old) == []  # nothing of it is there any more
    assert said(board.open(client), new) == [("OPEN", "")]


def test_an_answer_that_is_older_than_the_claim_does_not_settle_it() -> None:
    board = Board()
    a, b = board.host("host-a"), board.host("host-b")
    board.register(a, token=1)
    assert board.register(b, token=2) == []  # the question under way may have been answered before b had it
    actions = board.answer(S1, held("host-a", 1))
    assert said(actions, a) == [("REGISTERED", "")] and Ask(S1, False) in actions
    assert said(board.answer(S1, held("host-b", 2)), b) == [("REGISTERED", "")]


@pytest.mark.parametrize("routed", [True, False])
def test_unknown_and_not_allowed_are_alike(routed: bool) -> None:
    board = Board()
    host, client = board.host(), board.client(sessions="web-*")
    if routed:
        board.routed(host, name="secret")
    first, second = board.open(client, S1, 1), board.open(client, S2, 2)
    assert (first, second) == ([Ask(S1, True)], [Ask(S2, True)])
    answers = [board.answer(S1, held(name="secret")), board.answer(S2, "unknown")]
    tables = [frames(actions, client, Kind.REFUSED)[0].table() for actions in answers]
    assert tables[0] == tables[1] and tables[0]["code"] == "no_session"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (held(name="work"), ("STATUS", "waiting")),
        (LeaseStatus(4, "parked", "host-a", 15.0, name="work"), ("STATUS", "waiting")),
        (LeaseStatus(4, "free", "host-a", 15.0, over=True, name="work"), ("REFUSED", "exited")),
        ("silent", ("REFUSED", "unavailable")),
    ],
)
def test_open_waits_for_a_session_without_a_route(answer: object, expected: tuple[str, str]) -> None:
    board = Board()
    client = board.client(sessions="work")
    board.open(client)
    assert said(board.answer(S1, answer), client) == [expected]  # type: ignore[arg-type]


def test_waiting_channels_are_joined_when_the_session_registers() -> None:
    board = Board()
    client, host = board.client(sessions="work"), board.host()
    board.open(client)
    board.answer(S1, held(name="work"))
    actions = board.routed(host)
    assert said(actions, client) == [("STATUS", "routed")] and said(actions, host) == [("REGISTERED", ""), ("OPEN", "")]


@pytest.mark.parametrize(
    ("state", "closed", "then"),
    [("moving", "moved", "moving"), ("parked", "moved", "parked"), ("fenced", "lost", "fenced")],
)
def test_leave_reports_the_state_of_the_session(state: str, closed: str, then: str) -> None:
    board = Board()
    host, client = board.host(), board.client()
    board.routed(host)
    board.open(client)
    assert said(board.leave(host, state, to="host-b"), client) == [("CLOSE", closed)]
    board.open(client)
    actions = board.answer(S1, held(name="work"))
    assert said(actions, client) == [("STATUS", then)]
    assert frames(actions, client, Kind.STATUS)[0].table()["to"] == "host-b"


def test_open_of_an_ended_session_is_refused() -> None:
    board = Board()
    host, client = board.host(), board.client()
    board.routed(host)
    board.open(client)
    assert said(board.leave(host, "exited"), client) == [("CLOSE", "exited")]
    board.open(client)
    assert said(board.answer(S1, held()), client) == [("REFUSED", "exited")]  # before the host let go of the lease


def test_a_host_can_only_leave_for_its_own_incarnation() -> None:
    board = Board()
    a, b, client = board.host("host-a"), board.host("host-b"), board.client()
    board.routed(b, "host-b", token=2)
    board.open(client)
    assert board.leave(a, "exited", token=2) == [] and board.leave(b, "exited", token=1) == []
    board.register(a, token=3)
    board.leave(a, "moving", token=3)  # before the store has said a word
    board.answer(S1, held("host-b", 2))
    assert said(board.open(client, channel=2), b) == [("OPEN", "")]


def test_a_lost_host_removes_only_its_own_routes() -> None:
    board = Board()
    a, b, client = board.host("host-a"), board.host("host-b"), board.client()
    board.routed(a)
    board.routed(b, "host-b", S2)
    board.open(client, S1, 1)
    board.open(client, S2, 2)
    assert said(board.gone(a), client) == [("CLOSE", "lost")]
    assert said(board.hear(client, Frame(Kind.DATA, channel=2, payload=b"x")), b) == [("DATA", "")]


def test_channels_of_a_lost_client_are_closed_at_the_host() -> None:
    board = Board()
    host, client = board.host(), board.client()
    board.routed(host)
    board.open(client)
    assert said(board.gone(client), host) == [("CLOSE", "gone")]
    assert board.hear(host, Frame(Kind.DATA, channel=1, payload=b"x")) == []


def test_routes_are_reconfirmed_and_expire_after_a_ttl_of_silence() -> None:
    board = Board()
    host, client = board.host(), board.client()
    board.routed(host)
    board.open(client)
    board.now += 5
    assert board.do(Ticked()) == [Ask(S1, False)] and board.do(Ticked()) == []
    assert board.answer(S1, held()) == []
    for _ in range(2):
        board.now += 5
        assert board.do(Ticked()) == [Ask(S1, False)]
        assert board.answer(S1, "silent") == []
    board.now += 5.1
    actions = board.do(Ticked())
    assert said(actions, client) == [("CLOSE", "lost")] and ("REFUSED", "unavailable") in said(actions, host)


def test_a_paused_router_does_not_use_old_confirmations() -> None:
    board = Board()
    host, client = board.host(), board.client()
    board.routed(host)
    board.now += 15.1  # stopped, suspended: no tick came
    actions = board.open(client)
    assert said(actions, host) == [("REFUSED", "unavailable")] and said(actions, client) == []
    assert said(board.answer(S1, held("host-b", 2)), client) == [("STATUS", "waiting")]


@pytest.mark.parametrize(
    ("answer", "closed", "code"),
    [
        (held("host-b", 2), "moved", "fenced"),
        (LeaseStatus(1, "parked", "host-a", 15.0), "lost", "not_confirmed"),
        ("unknown", "lost", "not_confirmed"),
    ],
)
def test_a_route_that_is_not_confirmed_is_removed(answer: object, closed: str, code: str) -> None:
    board = Board()
    host, client = board.host(), board.client()
    board.routed(host)
    board.open(client)
    board.now += 5
    board.do(Ticked())
    actions = board.answer(S1, answer)  # type: ignore[arg-type]
    assert said(actions, client) == [("CLOSE", closed)] and said(actions, host)[-1] == ("REFUSED", code)


def test_waiting_channels_are_refused_when_the_session_ends() -> None:
    board = Board()
    client = board.client(sessions="work")
    board.open(client)
    board.answer(S1, held(name="work"))
    board.now += 10
    assert board.do(Ticked()) == [Ask(S1, False)]
    assert board.answer(S1, "silent") == []  # waiting channels keep waiting
    board.now += 10
    board.do(Ticked())
    assert said(board.answer(S1, LeaseStatus(2, "free", "x", 15.0, over=True)), client) == [("REFUSED", "exited")]


def test_data_is_forwarded_unchanged_to_the_other_end_only() -> None:
    board = Board()
    host, one, two = board.host(), board.client("one"), board.client("two")
    board.routed(host, token=7)
    board.open(one, channel=9)
    board.open(two, channel=9)
    (first,) = frames(board.hear(one, Frame(Kind.DATA, S1, 7, 0, 9, b"1")), host, Kind.DATA)
    (second,) = frames(board.hear(two, Frame(Kind.DATA, S1, 7, 0, 9, b"2")), host, Kind.DATA)
    assert first.channel != second.channel and (first.payload, second.payload) == (b"1", b"2")
    actions = board.hear(host, Frame(Kind.DATA, S1, 7, 0, second.channel, b"3"))
    assert (said(actions, one), frames(actions, two, Kind.DATA)) == ([], [Frame(Kind.DATA, S1, 7, 0, 9, b"3")])


def test_credit_is_spent_and_given_back() -> None:
    board = Board(Limits(window=10))
    host, client = board.host(), board.client()
    board.routed(host)
    board.open(client)
    assert said(board.hear(client, Frame(Kind.DATA, channel=1, payload=bytes(10))), host) == [("DATA", "")]
    assert said(board.hear(host, with_credit(1, 4)), client) == [("CREDIT", "")]
    assert said(board.hear(client, Frame(Kind.DATA, channel=1, seq=1, payload=bytes(4))), host) == [("DATA", "")]


@pytest.mark.parametrize(
    ("by_client", "frame"),
    [
        (True, Frame(Kind.DATA, channel=1, payload=bytes(11))),  # beyond its credit
        (False, Frame(Kind.DATA, channel=1, payload=bytes(11))),
        (True, Frame(Kind.DATA, channel=1, seq=1)),  # out of turn
        (False, Frame(Kind.DATA, S2, channel=1)),  # about another session
        (False, Frame(Kind.DATA, token=2, channel=1)),  # about another incarnation
        (True, with_credit(1, 1)),  # for what was never sent
        (False, with_credit(1, 1)),
    ],
)
def test_flow_control_violation_closes_only_that_channel(by_client: bool, frame: Frame) -> None:
    board = Board(Limits(window=10))
    host, client = board.host(), board.client()
    board.routed(host)
    board.open(client)
    board.open(client, channel=2)
    actions = board.hear(client if by_client else host, frame)
    assert said(actions, client) == said(actions, host) == [("CLOSE", "protocol")]
    assert said(board.hear(client, Frame(Kind.DATA, channel=2, payload=b"x")), host) == [("DATA", "")]


@pytest.mark.parametrize(
    ("by_client", "frame"),
    [
        (True, Frame(Kind.REGISTER, S1, 1, payload=b'{"name":"x"}')),
        (True, Frame(Kind.LEAVE, S1, 1, payload=b'{"state":"exited"}')),
        (True, Frame(Kind.HELLO)),
        (True, Frame(Kind.STATUS, channel=1)),
        (True, Frame(Kind.OPEN, S1, channel=0)),
        (True, Frame(Kind.OPEN, channel=3)),
        (True, Frame(Kind.OPEN, S1, channel=3, payload=b"[]")),
        (True, Frame(Kind.OPEN, S1, channel=3, payload=b"{" + b" " * 5000 + b"}")),
        (True, Frame(Kind.OPEN, S1, channel=1, payload=b"{}")),  # in use
        (True, Frame(Kind.CREDIT, channel=1, payload=b"abc")),
        (False, Frame(Kind.OPEN, S1, channel=1)),
        (False, Frame(Kind.LIST)),
        (False, Frame(Kind.REGISTER, S1, 0, payload=b'{"name":"x"}')),
        (False, Frame(Kind.REGISTER, "", 1, payload=b'{"name":"x"}')),
        (False, Frame(Kind.REGISTER, S1, 1, payload=b'{"name":""}')),
        (False, Frame(Kind.REGISTER, S1, 1, payload=b'{"name":"a\\u001b[2J"}')),
        (False, Frame(Kind.REGISTER, S1, 1, payload=b'{"name":"x","info":[]}')),
        (False, with_table(Kind.REGISTER, {"name": "x", "info": {"a": "b" * 2048}}, S1, 1)),
        (False, Frame(Kind.REGISTER, S1, 1, payload=b'{"name":"x","state":"\\ud800"}')),
        (False, Frame(Kind.REGISTER, S1, 1, payload=b'{"name":"x","info":{"load":1e999}}')),
        (False, Frame(Kind.MOVED, S1, 1, payload=b'{"to":"b","at":1e999}')),
        (False, Frame(Kind.LEAVE, S1, 1, payload=b'{"state":"moving","to":"\\udfff"}')),
        (False, Frame(Kind.LEAVE, S1, 1, payload=b'{"state":"gone"}')),
        (False, Frame(Kind.REGISTERED, S1, 1)),
    ],
)
def test_protocol_violation_ends_the_connection(by_client: bool, frame: Frame) -> None:
    board = Board()
    host, client = board.host(), board.client()
    board.routed(host)
    board.open(client)
    who = client if by_client else host
    assert said(board.hear(who, frame), who) == [("END", "protocol")]
    assert frames(board.hear(client, Frame(Kind.LIST)), client, Kind.LISTING), "no other connection is affected"


def test_a_channel_is_not_used_before_it_is_open() -> None:
    board = Board()
    client = board.client()
    board.open(client)
    assert said(board.hear(client, Frame(Kind.DATA, channel=1)), client) == [("CLOSE", "protocol")]
    assert board.answer(S1, held()) == []


def test_closing_while_waiting_leaves_nothing() -> None:
    board = Board()
    client = board.client()
    board.open(client)
    board.hear(client, Frame(Kind.CLOSE, channel=1))
    assert board.answer(S1, "unknown") == [] and board.board.channels.entries == {}


def test_close_is_passed_on_with_its_reason() -> None:
    board = Board()
    host, client = board.host(), board.client()
    board.routed(host)
    board.open(client)
    actions = board.hear(host, with_table(Kind.CLOSE, {"code": "not_admitted", "why": "no"}, S1, 1, 1))
    assert said(actions, client) == [("CLOSE", "not_admitted")]
    assert board.hear(host, Frame(Kind.DATA, channel=1, payload=b"late")) == []  # it could not know yet


def test_limits_on_connections_channels_and_sessions() -> None:
    board = Board(Limits(client_connections=2, host_connections=1, channels=2, sessions=2))
    host, client = board.host(), board.client()
    board.client()
    board.count += 1
    from cmdop_migrate.relay.router.router_events import Joined
    from tests.unit.relay.router_board import claims

    assert said(board.do(Joined(90, claims("client", "alice"))), 90) == [("END", "too_many")]
    assert said(board.do(Joined(91, claims("host", "host-a"))), 91) == [("END", "too_many")]
    assert said(board.do(Joined(92, claims("client", "bob"))), 92) == [("WELCOME", "")]
    board.routed(host)
    board.routed(host, session=S2)
    assert said(board.register(host, "c3" * 12), host) == [("REFUSED", "too_many")]
    board.open(client, S1, 1)
    board.open(client, S2, 2)
    assert said(board.open(client, S1, 3), client) == [("REFUSED", "too_many")]


def test_requests_are_limited_in_time() -> None:
    board = Board(Limits(requests=2, refill=1))
    client = board.client()
    assert [said(board.hear(client, Frame(Kind.LIST)), client)[-1][0] for _ in range(3)] == [
        "LISTING",
        "LISTING",
        "END",
    ]
    board.now += 1
    assert said(board.hear(client, Frame(Kind.LIST)), client) == [("LISTING", "")]


def test_a_list_shows_what_the_credential_is_for() -> None:
    board = Board()
    host, client = board.host(), board.client(sessions="web-*")
    board.routed(host, session=S1, name="web-1", token=3)
    board.routed(host, session=S2, name="db")
    board.register(host, S1, 3, "web-1", info={"moves": 2})
    board.open(client, S1)
    (frame,) = frames(board.hear(client, Frame(Kind.LIST)), client, Kind.LISTING)
    (one,) = frame.table()["sessions"]
    assert one == {
        "session": S1, "name": "web-1", "host": "host-a", "to": None, "state": "running", "routed": True,
        "token": 3, "clients": 1, "info": {"moves": 2}, "moved": None,
    }  # fmt: skip
    board.leave(host, "moving", token=3, to="host-b")
    (one,) = frames(board.hear(client, Frame(Kind.LIST)), client, Kind.LISTING)[0].table()["sessions"]
    assert (one["state"], one["to"], one["host"], one["token"]) == ("moving", "host-b", None, 3)


def test_a_long_list_comes_in_pages() -> None:
    board = Board()
    host, client = board.host(), board.client()
    for number in range(1000):
        board.routed(host, session=f"{number + 1:024x}", name="n" * 60)
    pages = frames(board.hear(client, Frame(Kind.LIST)), client, Kind.LISTING)
    assert all(len(page.payload) <= PAYLOAD_MAX and encode(page) for page in pages)
    assert [page.table()["more"] for page in pages] == [True] * (len(pages) - 1) + [False] and len(pages) > 2
    assert sum(len(page.table()["sessions"]) for page in pages) == 1000


def test_a_name_that_was_not_kept_is_kept_with_the_next_route() -> None:
    board = Board()
    host = board.host()
    board.routed(host)
    board.do(NotKept(S1))
    board.gone(host)
    assert Keep(S1, "work") in board.routed(board.host())


def test_unused_entries_are_dropped_when_there_is_no_room() -> None:
    board = Board(Limits(remembered=10))
    for number in range(50):
        host = board.host(f"h{number}")
        board.routed(host, f"h{number}", f"{number + 1:024x}")
        board.gone(host)
    assert len(board.board.channels.entries) == 10
    client = board.client()
    for number in range(200):
        board.open(client, f"{number + 100:024x}", 1)
        board.answer(f"{number + 100:024x}", "unknown")
    assert len(board.board.channels.entries) == 10


def test_unexpected_answers_change_nothing() -> None:
    board = Board()
    assert board.do(Answered(S1, held())) == [] and board.board.channels.entries == {}
