"""The switchboard: who is joined to whom. Pure: events in, actions out, the time is given.

It keeps that a session has at most one route, and that a route's token was confirmed
by the lease store and is the highest ever seen. Everything that takes time (asking the
store, sending) is an action for the server, whose answer comes back as an event.
"""

from __future__ import annotations

from typing import Any

from cmdop_migrate.relay.credentials import Claims
from cmdop_migrate.relay.frames import Frame, FrameError, Kind, with_table
from cmdop_migrate.relay.router import replies
from cmdop_migrate.relay.router.channels import Patchbay
from cmdop_migrate.relay.router.router_events import (
    Action,
    Answer,
    Answered,
    Ask,
    End,
    Event,
    Joined,
    Keep,
    Left,
    Limits,
    Note,
    NotKept,
    Received,
    Send,
    Standing,
    Ticked,
)
from cmdop_migrate.relay.router.routing_state import Budget, Channel, Claim, Client, Entry, Host, Route

OPENING_MAX = 4096
CONFIRMATIONS_PER_TTL = 3
ASK_AGAIN = 10.0  # seconds: whether a session that clients wait for still exists
STOOD_STILL = 1.5  # seconds without any event, though time is told more often
_NO_SESSION = ("no_session", "no session of this identity that this credential is for")
_LEAVING = {"moving": "moved", "parked": "moved", "exited": "exited", "fenced": "lost"}


class Switchboard:
    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.bay = Patchbay(self.limits.window, self.limits.remembered)
        self._handled = float("-inf")
        self._moved: dict[str, dict[str, Any]] = {}  # session -> its last move, as its source told it

    def handle(self, event: Event, now: float) -> list[Action]:
        """What is to be done about it, in order."""
        # Whoever stood still, stopped or suspended, must not act on what was confirmed before.
        stale = self._ticked(now) if now - self._handled > STOOD_STILL and not isinstance(event, Ticked) else []
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
                if session in self.bay.entries:
                    self.bay.entries[session].kept = None
                return []
            case Ticked():
                return self._ticked(now)

    # Coming and going

    def _joined(self, conn: int, claims: Claims, now: float) -> list[Action]:
        limits, is_host = self.limits, claims.kind == "host"
        others = self.bay.hosts.values() if is_host else self.bay.clients.values()
        most = limits.host_connections if is_host else limits.client_connections
        if sum(one.claims.id == claims.id for one in others) >= most:
            return [End(conn, "too_many", f"more than {most} connections with one credential")]
        if is_host:
            self.bay.hosts[conn] = Host(conn, claims)
        else:
            self.bay.clients[conn] = Client(conn, claims, Budget(limits.requests, limits.refill, limits.requests, now))
        facts = {"name": claims.name, "role": claims.role, "window": limits.window, "beat": limits.beat}
        return [Send(conn, with_table(Kind.WELCOME, facts))]

    def _left(self, conn: int) -> list[Action]:
        actions: list[Action] = []
        client = self.bay.clients.pop(conn, None)
        for channel in list(client.channels.values()) if client else []:
            actions += self.bay.cut(channel, "gone", "the client's connection ended")
        host = self.bay.hosts.pop(conn, None)
        for session in list(host.sessions) if host else []:
            entry = self.bay.entries.get(session)
            if entry is not None and entry.route is not None and entry.route.conn == conn:
                actions += self._take_out(entry, "lost", "the host's connection ended")
        return actions

    def _received(self, conn: int, frame: Frame, now: float) -> list[Action]:
        client, host = self.bay.clients.get(conn), self.bay.hosts.get(conn)
        if frame.kind is Kind.BEAT or (client is None and host is None):
            return []  # a sign of life; or of one that is being ended
        passing = frame.kind in (Kind.DATA, Kind.CREDIT, Kind.CLOSE)
        if client is not None:
            if passing:
                return self.bay.from_client(client, frame)
            if frame.kind in (Kind.OPEN, Kind.LIST):
                if not client.budget.spend(now):
                    return [End(conn, "too_many", "too many requests")]
                return self._open(client, frame, now) if frame.kind is Kind.OPEN else self._list(client)
        if host is not None:
            if passing:
                return self.bay.from_host(host, frame)
            if frame.kind is Kind.REGISTER:
                return self._register(host, frame, now)
            if frame.kind is Kind.LEAVE:
                return self._leave(host, frame)
            if frame.kind is Kind.MOVED:
                return self._note_move(host, frame)
        raise FrameError(f"{frame.kind.name} does not come from there")

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
        channel = self.bay.plug(client, frame)
        entry = self.bay.entry(session)
        if entry.route is not None and client.claims.covers(session, entry.name):
            return self.bay.join(entry, entry.route, channel)
        # Unknown and not allowed take the same way, and the same time: the store is asked about both.
        return self._ask(entry, channel, now)

    def _decide(self, entry: Entry, channel: Channel, answer: Answer) -> list[Action]:
        """What a channel that leads nowhere yet gets by the store's word."""
        if not self.bay.is_plugged(channel) or channel.host is not None:
            return []  # it was closed, or joined meanwhile
        covered = self.bay.clients[channel.client].claims.covers(entry.session, entry.name)
        key = channel.client, channel.number
        if entry.route is not None and covered:
            return self.bay.join(entry, entry.route, channel)
        if answer == "silent":
            return [] if key in entry.waiting else self._refuse(channel, "unavailable", "the lease store is silent")
        if isinstance(answer, str) or not covered:
            return self._refuse(channel, *_NO_SESSION)
        if answer.over or (entry.state == "exited" and answer.state == "held"):  # or: its host will let go of it soon
            return self._refuse(channel, "exited", "the session has ended")
        if key in entry.waiting:
            return []
        entry.waiting[key] = channel
        return [Send(channel.client, replies.status(entry, channel))]

    def _refuse(self, channel: Channel, code: str, why: str) -> list[Action]:
        self.bay.pull(channel)
        claims = self.bay.clients[channel.client].claims
        facts = {"code": code, "actor": claims.name, "credential": claims.id}
        return [
            Send(channel.client, replies.refused(code, why, channel.session, channel=channel.number)),
            Note("relay_open_refused", channel.session, facts),
        ]

    def _list(self, client: Client) -> list[Action]:
        known = (one for one in self.bay.entries.values() if one.highest and _covers(client, one))
        return [Send(client.conn, frame) for frame in replies.listing(known, self._moved)]

    # Hosts

    def _register(self, host: Host, frame: Frame, now: float) -> list[Action]:
        claim, session, token = replies.claim(host.conn, frame), frame.session, frame.token
        if session not in host.sessions and len(host.sessions) >= self.limits.sessions:
            why = f"more than {self.limits.sessions} sessions of one host"
            return self._reject(host, session, token, "too_many", why)
        entry = self.bay.entry(session)
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
        """What a REGISTER that waited for the store's word gets."""
        host = self.bay.hosts.get(claim.conn)
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
            return self._reject(host, session, token, "not_confirmed", f"by the lease it is {answer.state}, not so")
        actions: list[Action] = []
        if entry.route is not None:
            # Tokens below were taken out already: this is the same host on a newer connection.
            actions += self._take_out(entry, "lost", "the host dialled again")
        host.sessions.add(session)
        entry.name, entry.state, entry.to = claim.name, "routed", ""
        entry.route = Route(host.conn, host.claims.name, token, claim.state, claim.info, entry.asked, answer.ttl)
        actions.append(Send(host.conn, Frame(Kind.REGISTERED, session, token)))
        actions.append(Note("relay_routed", session, {"to": host.claims.name, "token": token}))
        if entry.kept != claim.name:
            entry.kept = claim.name
            actions.append(Keep(session, claim.name))
        for channel in list(entry.waiting.values()):
            if _covers(self.bay.clients[channel.client], entry):
                actions += self.bay.join(entry, entry.route, channel)
        return actions

    def _reject(self, host: Host, session: str, token: int, code: str, why: str) -> list[Action]:
        entry = self.bay.entries.get(session)
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
        entry = self.bay.entries.get(frame.session)
        if entry is None:
            return []
        _withdraw(entry, host)
        route = entry.route
        if route is None or route.conn != host.conn:
            host.sessions.discard(frame.session)
            return []
        if route.token != frame.token:
            return []  # of an older incarnation
        actions = self._take_out(entry, _LEAVING[state], f"the session is {state}", state, to)
        return [*actions, Note("relay_left", entry.session, {"token": frame.token, "state": state, "to": to})]

    def _note_move(self, host: Host, frame: Frame) -> list[Action]:
        """For listings; nothing is decided by it. Known or not yet: after a restart this may come before who has it."""
        moved = replies.moved(host.claims.name, frame)
        before = self._moved.pop(frame.session, None)
        self._moved[frame.session] = moved if before is None or before["token"] <= moved["token"] else before
        if len(self._moved) > self.limits.remembered:
            del self._moved[next(iter(self._moved))]
        return []

    def _take_out(self, entry: Entry, code: str, why: str, state: str = "waiting", to: str = "") -> list[Action]:
        """There is no route any more. Both ends of its channels hear of it, while they are there."""
        route = entry.route
        assert route is not None
        entry.route, entry.state, entry.to = None, state, to
        actions: list[Action] = []
        for channel in list(route.channels.values()):
            actions += self.bay.cut(channel, code, why)
        host = self.bay.hosts.get(route.conn)
        if host is not None:
            host.sessions.discard(entry.session)
        self.bay.forget(entry)
        return actions

    # The lease store

    def _ask(self, entry: Entry, waiter: Claim | Channel, now: float) -> list[Action]:
        if entry.asking is not None:
            entry.later.append(waiter)
            return []
        return self._ask_now(entry, [waiter], now)

    def _ask_now(self, entry: Entry, waiters: list[Claim | Channel], now: float) -> list[Action]:
        entry.asking, entry.asked = waiters, now
        return [Ask(entry.session, any(isinstance(one, Channel) for one in waiters))]

    def _answered(self, session: str, answer: Answer, now: float) -> list[Action]:
        entry = self.bay.entries.get(session)
        if entry is None or entry.asking is None:
            return []
        waiters, entry.asking = entry.asking, []  # still in use, until all is said
        actions = self._confirm(entry, answer)
        for one in waiters:
            if isinstance(one, Claim):
                actions += self._settle(entry, one, answer)
        for one in [*waiters, *entry.waiting.values()]:
            if isinstance(one, Channel):
                actions += self._decide(entry, one, answer)
        entry.asking = None
        if entry.later:
            later, entry.later = entry.later, []
            return actions + self._ask_now(entry, later, now)
        self.bay.forget(entry)
        return actions

    def _confirm(self, entry: Entry, answer: Answer) -> list[Action]:
        """What the store's word means for the route there is."""
        if isinstance(answer, Standing):
            entry.highest = max(entry.highest, answer.token)
            entry.name = entry.name or answer.name
        route = entry.route
        if route is None or answer == "silent":
            return []
        replaced = isinstance(answer, Standing) and answer.token > route.token
        if isinstance(answer, Standing) and not replaced and answer.state == "held" and answer.host == route.host:
            route.confirmed, route.ttl = entry.asked, answer.ttl
            return []
        if replaced:
            return self._put_out(entry, route, "moved", "fenced", "a newer token was given")
        return self._put_out(entry, route, "lost", "not_confirmed", "the lease is not held")

    def _put_out(self, entry: Entry, route: Route, closed: str, code: str, why: str) -> list[Action]:
        """Take it out, and tell its host."""
        actions = self._take_out(entry, closed, why)
        host = self.bay.hosts.get(route.conn)
        return actions + (self._reject(host, entry.session, route.token, code, why) if host else [])

    def _ticked(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for entry in list(self.bay.entries.values()):
            route = entry.route
            if route is not None and now - route.confirmed >= route.ttl:
                actions += self._put_out(entry, route, "lost", "unavailable", "the lease store does not answer")
            elif (route is not None or entry.waiting) and entry.asking is None:
                pause = route.ttl / CONFIRMATIONS_PER_TTL if route is not None else ASK_AGAIN
                # Those that came at once, after a restart, are not to be asked about at once for ever.
                if now - entry.asked >= pause * (0.75 + 0.25 * int(entry.session[:2], 16) / 255):
                    actions += self._ask_now(entry, [], now)
        return actions


def _covers(client: Client, entry: Entry) -> bool:
    return client.claims.covers(entry.session, entry.name)


def _withdraw(entry: Entry, host: Host) -> None:
    """What this host claimed before is not to be settled any more."""
    for waiters in (entry.asking or [], entry.later):
        waiters[:] = [one for one in waiters if not (isinstance(one, Claim) and one.conn == host.conn)]
