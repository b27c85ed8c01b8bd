"""Any order of events, against a lease store that may be slow or silent: what must hold, holds after each of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cmdop_migrate.relay.frames import Frame, Kind, encode, with_credit, with_table
from cmdop_migrate.relay.router.router import Router
from cmdop_migrate.relay.router.router_events import (
    Action,
    Answered,
    Ask,
    End,
    Joined,
    LeaseStatus,
    Left,
    Limits,
    NotKept,
    Received,
    Send,
    Ticked,
)
from tests.unit.relay.router_board import claims

SESSIONS = ["0a" * 12, "1b" * 12, "2c" * 12]
HOSTS = ["host-a", "host-b"]
LIMITS = Limits(window=20, client_connections=2, host_connections=2, channels=3, sessions=2, remembered=2, requests=1e9)
CONNS = st.integers(0, 8)
CHANNELS = st.integers(0, 4)


class World(RuleBasedStateMachine):
    """Connections 0 to 3 are hosts (two names), 4 to 8 clients; the last client's credential is for one session."""

    def __init__(self) -> None:
        super().__init__()
        self.board = Router(LIMITS)
        self.now = 0.0
        self.there: set[int] = set()
        self.lease = dict.fromkeys(SESSIONS, LeaseStatus(1, "held", "host-a", 15.0, name="n"))
        self.asked: dict[str, LeaseStatus] = {}  # as the store stood when it was asked, or later
        self.confirmed = dict.fromkeys(SESSIONS, 0)  # the highest token that the board was told
        self.opened: dict[tuple[int, int], str] = {}
        self.in_flight: dict[tuple[int, int], int] = {}

    def do(self, event: Any) -> None:
        for action in self.board.handle(event, self.now):
            self.check(action)

    def check(self, action: Action) -> None:
        if isinstance(action, Ask):
            assert action.session not in self.asked, "two questions about one session simultaneously"
            self.asked[action.session] = self.lease[action.session]
        elif isinstance(action, End):
            self.ending = action.conn
        elif isinstance(action, Send):
            assert action.conn in self.there, "a frame to a connection that is gone"
            encode(action.frame)
            self.check_frame(action.conn, action.frame)

    def check_frame(self, conn: int, frame: Frame) -> None:
        if conn >= 4 and frame.channel:
            assert self.opened.get((conn, frame.channel)) == frame.session, "a frame of a channel that is not its own"
            if frame.kind in (Kind.CLOSE, Kind.REFUSED):
                del self.opened[conn, frame.channel]
        if frame.kind is Kind.STATUS and frame.table()["state"] == "routed":
            assert frame.token >= self.confirmed[frame.session]
        if frame.kind in (Kind.OPEN, Kind.REGISTERED, Kind.DATA):
            assert frame.token >= self.confirmed[frame.session], "a lower token after a higher one was confirmed"

    @initialize()
    def all_are_there(self) -> None:
        for conn in (0, 1, 4, 5, 8):
            self.join(conn)

    @rule(conn=CONNS)
    def join(self, conn: int) -> None:
        if conn not in self.there:
            self.there.add(conn)
            who = (
                claims("host", HOSTS[conn % 2])
                if conn < 4
                else claims("client", "c", SESSIONS[0] if conn == 8 else "*", str(conn))
            )
            self.ending: int | None = None
            self.do(Joined(conn, who))
            self._maybe_end()

    @rule(conn=CONNS)
    def leave_connection(self, conn: int) -> None:
        if conn in self.there:
            self.there.discard(conn)
            self.opened = {key: value for key, value in self.opened.items() if key[0] != conn}
            self.do(Left(conn))

    def hear(self, conn: int, frame: Frame) -> None:
        if conn in self.there:
            self.ending = None
            self.do(Received(conn, frame))
            self._maybe_end()

    def _maybe_end(self) -> None:
        if self.ending is not None:
            self.leave_connection(self.ending)

    @rule(conn=st.integers(0, 3), session=st.sampled_from(SESSIONS), token=st.integers(1, 6))
    def register(self, conn: int, session: str, token: int) -> None:
        self.hear(conn, with_table(Kind.REGISTER, {"name": "n"}, session, token))

    @rule(conn=st.integers(0, 3), session=st.sampled_from(SESSIONS))
    def register_rightly(self, conn: int, session: str) -> None:
        self.register(conn, session, self.lease[session].token)

    @rule(
        conn=st.integers(0, 3),
        session=st.sampled_from(SESSIONS),
        token=st.integers(1, 6),
        state=st.sampled_from(["moving", "exited"]),
    )
    def leave(self, conn: int, session: str, token: int, state: str) -> None:
        self.hear(conn, with_table(Kind.LEAVE, {"state": state}, session, token))

    @rule(conn=st.integers(4, 8), session=st.sampled_from(SESSIONS), channel=CHANNELS)
    def open(self, conn: int, session: str, channel: int) -> None:
        if conn in self.there and channel and (conn, channel) not in self.opened:
            self.opened[conn, channel] = session
        self.hear(conn, with_table(Kind.OPEN, {}, session, 0, channel))

    @rule(conn=CONNS, channel=CHANNELS, seq=st.integers(0, 2), size=st.sampled_from([0, 1, 7, 21]))
    def data(self, conn: int, channel: int, seq: int, size: int) -> None:
        self.hear(conn, Frame(Kind.DATA, "", 0, seq, channel, bytes(size)))

    @rule(conn=CONNS, channel=CHANNELS, count=st.integers(0, 9))
    def credit(self, conn: int, channel: int, count: int) -> None:
        self.hear(conn, with_credit(channel, count))

    @rule(conn=CONNS, channel=CHANNELS)
    def close(self, conn: int, channel: int) -> None:
        if conn >= 4:
            self.opened.pop((conn, channel), None)
        self.hear(conn, Frame(Kind.CLOSE, channel=channel))

    @rule(conn=CONNS, kind=st.sampled_from([Kind.LIST, Kind.BEAT, Kind.BEAT, Kind.LIST, Kind.LIST, Kind.HELLO]))
    def other(self, conn: int, kind: Kind) -> None:
        self.hear(conn, Frame(kind))

    @rule(session=st.sampled_from(SESSIONS), host=st.sampled_from(HOSTS))
    def take_lease(self, session: str, host: str) -> None:
        self.lease[session] = LeaseStatus(self.lease[session].token + 1, "held", host, 15.0, name="n")

    @rule(session=st.sampled_from(SESSIONS))
    def park_lease(self, session: str) -> None:
        self.lease[session] = LeaseStatus(self.lease[session].token, "parked", "host-a", 15.0, name="n")

    @rule(conn=st.integers(0, 1), session=st.sampled_from(SESSIONS))
    def move_here(self, conn: int, session: str) -> None:
        """What ought to happen most of the time."""
        self.join(conn)
        self.take_lease(session, HOSTS[conn % 2])
        self.register_rightly(conn, session)
        self.settle(session)

    @rule(conn=st.integers(4, 8), session=st.sampled_from(SESSIONS), channel=st.integers(1, 3))
    def talk(self, conn: int, session: str, channel: int) -> None:
        self.join(conn)
        if (conn, channel) not in self.opened:
            self.open(conn, session, channel)
            self.settle(session)
            self.data(conn, channel, 0, 7)

    def settle(self, session: str) -> None:
        """The store answers all that it is asked, as things stand."""
        while session in self.asked:
            del self.asked[session]
            self.confirmed[session] = max(self.confirmed[session], self.lease[session].token)
            self.do(Answered(session, self.lease[session]))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), late=st.booleans(), silent=st.booleans())
    def answer(self, data: st.DataObject, late: bool, silent: bool) -> None:
        session = data.draw(st.sampled_from(sorted(self.asked)))
        then = self.asked.pop(session)
        answer = then if late else self.lease[session]
        if not silent:
            self.confirmed[session] = max(self.confirmed[session], answer.token)
        self.do(Answered(session, "silent" if silent else answer))

    @rule(seconds=st.sampled_from([0.5, 5.0, 16.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.do(Ticked())

    @rule(session=st.sampled_from(SESSIONS))
    def not_kept(self, session: str) -> None:
        self.do(NotKept(session))

    @invariant()
    def everything_fits_together(self) -> None:
        channels = self.board.channels
        assert set(channels.clients) | set(channels.hosts) <= self.there
        for client in channels.clients.values():
            assert len(client.channels) <= LIMITS.channels
            assert {(client.conn, number) for number in client.channels} <= set(self.opened)
        for entry in channels.entries.values():
            route = entry.route
            if route is not None:
                assert route.conn in channels.hosts and entry.session in channels.hosts[route.conn].sessions
                assert route.token == entry.highest == self.confirmed[entry.session], "a route that is not the highest"
                assert not entry.waiting, "it waits for what is there"
                assert all(one.host == route.conn for one in route.channels.values())
            for key, channel in [*entry.waiting.items(), *(route.channels.items() if route else [])]:
                assert channels.clients[key[0]].channels[key[1]] is channel
        for host in channels.hosts.values():
            assert len(host.sessions) <= LIMITS.sessions
            for channel in host.channels.values():
                assert channels.clients[channel.client].channels[channel.number] is channel
                for flow in (channel.to_host, channel.to_client):
                    assert 0 <= flow.credit <= LIMITS.window
        assert len(channels.entries) <= LIMITS.remembered + len(SESSIONS)


World.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
test_any_order_of_events = pytest.mark.timeout(200)(World.TestCase)
