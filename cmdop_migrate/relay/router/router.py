"""Decide which client channel leads to which host. Pure: events in, actions out, the time is a parameter.

It guarantees that a session has at most one route, and that a route's fencing token was
confirmed by the lease store and is the highest ever seen. Everything that takes time (asking
the store, sending) is an action for the server, whose result comes back as an event.
"""

from __future__ import annotations

from typing import Any

from cmdop_migrate.relay.credentials import Claims
from cmdop_migrate.relay.frames import Frame, FrameError, Kind, with_table
from cmdop_migrate.relay.router import replies
from cmdop_migrate.relay.router.channels import ChannelTable
from cmdop_migrate.relay.router.router_events import (
    Action,
    Answer,
    Answered,
    Ask,
    End,
    Event,
    Joined,
    Keep,
    LeaseStatus,
    Left,
    Limits,
    Note,
    NotKept,
    Received,
    Send,
    Ticked,
)
from cmdop_migrate.relay.router.routing_state import Budget, Channel, Claim, Client, Entry, Host, Route

OPENING_MAX = 4096
CONFIRMATIONS_PER_TTL = 3
ASK_AGAIN = 10.0  # seconds between questions whether a session that clients wait for still exists
PAUSED = 1.5  # seconds without any event, though ticks are more frequent: the process was stopped or suspended
_NO_SESSION = ("no_session", "no session of this identity that this credential is for")
_LEAVING = {"moving": "moved", "parked": "moved", "exited": "exited", "fenced": "lost"}


class Router:
    """Decide the routes of one relay."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.channels = ChannelTable(self.limits.window, self.limits.remembered)
        self._handled = float("-inf")
        self._moved: dict[str, dict[str, Any]] = {}  # session -> its last move, as the source host reported it

    def handle(self, event: Event, now: float) -> list[Action]:
        """Return the actions that an event requires, in order."""
        # After a pause of this process, routes that were confirmed before it must not be used.
        stale = self._ticked(now) if now - self._handled > PAUSED and not isinstance(event, Ticked) else []
        self._handled = now
        return stale + self._handle(event, now)

    def _handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case Received(conn, frame):
                try:
                    return self._received(conn, frame, now)
                except FrameError as error:
                    return [End(conn, "protocol", str(error))]
            case Joined(conn, claims):
                return self._joined(conn, claims, now)
            case Left(conn):
                return self._left(conn)
            case Answered(session, answer):
                return self._answered(session, answer, now)
            case NotKept(session):
                if session in self.channels.entries:
                    self.channels.entries[session].kept = None
                return []
            case Ticked():
                return self._ticked(now)

    # Connections

    def _joined(self, conn: int, claims: Claims, now: float) -> list[Action]:
        limits, is_host = self.limits, claims.kind == "host"
        others = self.channels.hosts.values() if is_host else self.channels.clients.values()
        most = limits.host_connections if is_host else limits.client_connections
        if sum(other.claims.id == claims.id for other in others) >= most:
            return [End(conn, "too_many", f"more than {most} connections with one credential")]
        if is_host:
            self.channels.hosts[conn] = Host(conn, claims)
        else:
            self.channels.clients[conn] = Client(
                conn, claims, Budget(limits.requests, limits.refill, limits.requests, now)
            )
        facts = {"name": claims.name, "role": claims.role, "window": limits.window, "beat": limits.beat}
        return [Send(conn, with_table(Kind.WELCOME, facts))]

    def _left(self, conn: int) -> list[Action]:
        actions: list[Action] = []
        client = self.channels.clients.pop(conn, None)
        for channel in list(client.channels.values()) if client else []:
            actions += self.channels.cut(channel, "gone", "the client's connection ended")
        host = self.channels.hosts.pop(conn, None)
        for session in list(host.sessions) if host else []:
            entry = self.channels.entries.get(session)
            if entry is not None and entry.route is not None and entry.route.conn == conn:
                actions += self._remove_route(entry, "lost", "the host's connection ended")
        return actions

    def _received(self, conn: int, frame: Frame, now: float) -> list[Action]:
        client, host = self.channels.clients.get(conn), self.channels.hosts.get(conn)
        if frame.kind is Kind.BEAT or (client is None and host is None):
            return []  # a heartbeat; or a connection that is being ended
        is_forwarded = frame.kind in (Kind.DATA, Kind.CREDIT, Kind.CLOSE)
        if client is not None:
            if is_forwarded:
                return self.channels.from_client(client, frame)
            if frame.kind in (Kind.OPEN, Kind.LIST):
                if not client.budget.spend(now):
                    return [End(conn, "too_many", "too many requests")]
                return self._open(client, frame, now) if frame.kind is Kind.OPEN else self._list(client)
        if host is not None:
            if is_forwarded:
                return self.channels.from_host(host, frame)
            if frame.kind is Kind.REGISTER:
                return self._register(host, frame, now)
            if frame.kind is Kind.LEAVE:
                return self._leave(host, frame)
            if frame.kind is Kind.MOVED:
                return self._note_move(host, frame)
        raise FrameError(f"{frame.kind.name} is not allowed from this peer")

    # Clients

    def _open(self, client: Client, frame: Frame, now: float) -> list[Action]:
        number, session = frame.channel, frame.session
        if number == 0 or number in client.channels or not session:
            raise FrameError("OPEN needs a session, and a channel number that is not in use")
        if len(frame.payload) > OPENING_MAX:
            raise FrameError(f"an OPEN of {len(frame.payload)} bytes")
        frame.table()
        if len(client.channels) >= self.limits.channels:
            why = f"more than {self.limits.channels} channels"
            return [Send(client.conn, replies.refused("too_many", why, session, channel=number))]
        channel = self.channels.add(client, frame)
        entry = self.channels.entry(session)
        if entry.route is not None and client.claims.covers(session, entry.name):
            return self.channels.join(entry, entry.route, channel)
        # Unknown and not allowed take the same path, and the same time: the store is asked about both.
        return self._ask(entry, channel, now)

    def _decide(self, entry: Entry, channel: Channel, answer: Answer) -> list[Action]:
        """Join, refuse or keep waiting a channel that is not joined, by the store's answer."""
        if not self.channels.is_open(channel) or channel.host is not None:
            return []  # the channel was closed or joined meanwhile
        covered = self.channels.clients[channel.client].claims.covers(entry.session, entry.name)
        key = channel.client, channel.number
        if entry.route is not None and covered:
            return self.channels.join(entry, entry.route, channel)
        if answer == "silent":
            return (
                [] if key in entry.waiting else self._refuse(channel, "unavailable", "the lease store does not answer")
            )
        if isinstance(answer, str) or not covered:
            return self._refuse(channel, *_NO_SESSION)
        if answer.over or (entry.state == "exited" and answer.state == "held"):  # or its host releases the lease soon
            return self._refuse(channel, "exited", "the session has ended")
        if key in entry.waiting:
            return []
        entry.waiting[key] = channel
        return [Send(channel.client, replies.status(entry, channel))]

    def _refuse(self, channel: Channel, code: str, why: str) -> list[Action]:
        self.channels.remove(channel)
        claims = self.channels.clients[channel.client].claims
        facts = {"code": code, "actor": claims.name, "credential": claims.id}
        return [
            Send(channel.client, replies.refused(code, why, channel.session, channel=channel.number)),
            Note("relay_open_refused", channel.session, facts),
        ]

    def _list(self, client: Client) -> list[Action]:
        known = (entry for entry in self.channels.entries.values() if entry.highest and _covers(client, entry))
        return [Send(client.conn, frame) for frame in replies.listing(known, self._moved)]

    # Hosts

    def _register(self, host: Host, frame: Frame, now: float) -> list[Action]:
        claim, session, token = replies.claim(host.conn, frame), frame.session, frame.token
        if session not in host.sessions and len(host.sessions) >= self.limits.sessions:
            why = f"more than {self.limits.sessions} sessions of one host"
            return self._reject(host, session, token, "too_many", why)
        entry = self.channels.entry(session)
        if token < entry.highest:
            return self._reject(host, session, token, "fenced", f"token {entry.highest} has been seen")
        route = entry.route
        if route is not None and route.conn == host.conn and route.token == token:
            route.state, route.info, entry.name = claim.state, claim.info, claim.name
            return [Send(host.conn, Frame(Kind.REGISTERED, session, token))]
        host.sessions.add(session)
        _withdraw(entry, host)
        return self._ask(entry, claim, now)

    def _settle(self, entry: Entry, claim: Claim, answer: Answer) -> list[Action]:
        """Accept or reject a REGISTER that waited for the store's answer."""
        host = self.channels.hosts.get(claim.conn)
        if host is None:
            return []
        session, token = entry.session, claim.token
        if answer == "silent":
            return self._reject(host, session, token, "unavailable", "the lease store does not answer")
        if isinstance(answer, str):
            return self._reject(host, session, token, "not_confirmed", "the lease store knows no such session")
        if token < entry.highest:
            return self._reject(host, session, token, "fenced", f"the lease is at token {entry.highest}")
        if answer.state != "held" or answer.host != host.claims.name or answer.token != token:
            return self._reject(
                host,
                session,
                token,
                "not_confirmed",
                f"the lease is {answer.state}, not held by this host with this token",
            )
        actions: list[Action] = []
        if entry.route is not None:
            # Routes of lower tokens were removed already: this is the same host on a newer connection.
            actions += self._remove_route(entry, "lost", "the host connected again")
        host.sessions.add(session)
        entry.name, entry.state, entry.to = claim.name, "routed", ""
        entry.route = Route(host.conn, host.claims.name, token, claim.state, claim.info, entry.asked, answer.ttl)
        actions.append(Send(host.conn, Frame(Kind.REGISTERED, session, token)))
        actions.append(Note("relay_routed", session, {"to": host.claims.name, "token": token}))
        if entry.kept != claim.name:
            entry.kept = claim.name
            actions.append(Keep(session, claim.name))
        for channel in list(entry.waiting.values()):
            if _covers(self.channels.clients[channel.client], entry):
                actions += self.channels.join(entry, entry.route, channel)
        return actions

    def _reject(self, host: Host, session: str, token: int, code: str, why: str) -> list[Action]:
        entry = self.channels.entries.get(session)
        if entry is None or entry.route is None or entry.route.conn != host.conn:
            host.sessions.discard(session)
        facts = {"code": code, "by": host.claims.name, "token": token, "credential": host.claims.id}
        return [
            Send(host.conn, replies.refused(code, why, session, token)),
            Note("relay_register_refused", session, facts),
        ]

    def _leave(self, host: Host, frame: Frame) -> list[Action]:
        state, to = frame.text("state"), frame.text("to", "")[: replies.NAME_MAX]
        if state not in _LEAVING:
            raise FrameError("LEAVE with an unknown state")
        entry = self.channels.entries.get(frame.session)
        if entry is None:
            return []
        _withdraw(entry, host)
        route = entry.route
        if route is None or route.conn != host.conn:
            host.sessions.discard(frame.session)
            return []
        if route.token != frame.token:
            return []  # from an older incarnation
        actions = self._remove_route(entry, _LEAVING[state], f"the session is {state}", state, to)
        return [*actions, Note("relay_left", entry.session, {"token": frame.token, "state": state, "to": to})]

    def _note_move(self, host: Host, frame: Frame) -> list[Action]:
        """Keep the figures of a move for listings; no decision depends on them. After a restart of the relay they may
        arrive before the session is registered."""
        moved = replies.moved(host.claims.name, frame)
        before = self._moved.pop(frame.session, None)
        self._moved[frame.session] = moved if before is None or before["token"] <= moved["token"] else before
        if len(self._moved) > self.limits.remembered:
            del self._moved[next(iter(self._moved))]
        return []

    def _remove_route(self, entry: Entry, code: str, why: str, state: str = "waiting", to: str = "") -> list[Action]:
        """Remove the route of a session, and close its channels at both ends."""
        route = entry.route
        assert route is not None
        entry.route, entry.state, entry.to = None, state, to
        actions: list[Action] = []
        for channel in list(route.channels.values()):
            actions += self.channels.cut(channel, code, why)
        host = self.channels.hosts.get(route.conn)
        if host is not None:
            host.sessions.discard(entry.session)
        self.channels.forget(entry)
        return actions

    # The lease store

    def _ask(self, entry: Entry, waiter: Claim | Channel, now: float) -> list[Action]:
        if entry.asking is not None:
            entry.later.append(waiter)
            return []
        return self._ask_now(entry, [waiter], now)

    def _ask_now(self, entry: Entry, waiters: list[Claim | Channel], now: float) -> list[Action]:
        entry.asking, entry.asked = waiters, now
        return [Ask(entry.session, any(isinstance(waiter, Channel) for waiter in waiters))]

    def _answered(self, session: str, answer: Answer, now: float) -> list[Action]:
        entry = self.channels.entries.get(session)
        if entry is None or entry.asking is None:
            return []
        waiters, entry.asking = entry.asking, []  # keeps the entry in use until the end of this method
        actions = self._confirm(entry, answer)
        for waiter in waiters:
            if isinstance(waiter, Claim):
                actions += self._settle(entry, waiter, answer)
        for waiter in [*waiters, *entry.waiting.values()]:
            if isinstance(waiter, Channel):
                actions += self._decide(entry, waiter, answer)
        entry.asking = None
        if entry.later:
            later, entry.later = entry.later, []
            return actions + self._ask_now(entry, later, now)
        self.channels.forget(entry)
        return actions

    def _confirm(self, entry: Entry, answer: Answer) -> list[Action]:
        """Confirm or remove the route of a session, by the store's answer."""
        if isinstance(answer, LeaseStatus):
            entry.highest = max(entry.highest, answer.token)
            entry.name = entry.name or answer.name
        route = entry.route
        if route is None or answer == "silent":
            return []
        replaced = isinstance(answer, LeaseStatus) and answer.token > route.token
        if isinstance(answer, LeaseStatus) and not replaced and answer.state == "held" and answer.host == route.host:
            route.confirmed, route.ttl = entry.asked, answer.ttl
            return []
        if replaced:
            return self._revoke_route(entry, route, "moved", "fenced", "a newer token was issued")
        return self._revoke_route(entry, route, "lost", "not_confirmed", "the lease is not held")

    def _revoke_route(self, entry: Entry, route: Route, closed: str, code: str, why: str) -> list[Action]:
        """Remove a route, and tell its host."""
        actions = self._remove_route(entry, closed, why)
        host = self.channels.hosts.get(route.conn)
        return actions + (self._reject(host, entry.session, route.token, code, why) if host else [])

    def _ticked(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for entry in list(self.channels.entries.values()):
            route = entry.route
            if route is not None and now - route.confirmed >= route.ttl:
                actions += self._revoke_route(entry, route, "lost", "unavailable", "the lease store does not answer")
            elif (route is not None or entry.waiting) and entry.asking is None:
                pause = route.ttl / CONFIRMATIONS_PER_TTL if route is not None else ASK_AGAIN
                # Spread the questions: sessions that registered together are not asked about together forever.
                if now - entry.asked >= pause * (0.75 + 0.25 * int(entry.session[:2], 16) / 255):
                    actions += self._ask_now(entry, [], now)
        return actions


def _covers(client: Client, entry: Entry) -> bool:
    return client.claims.covers(entry.session, entry.name)


def _withdraw(entry: Entry, host: Host) -> None:
    """Drop what this host has registered before and is not answered yet."""
    for waiters in (entry.asking or [], entry.later):
        waiters[:] = [waiter for waiter in waiters if not (isinstance(waiter, Claim) and waiter.conn == host.conn)]
