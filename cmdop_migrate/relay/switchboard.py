"""The switchboard: which frame goes where. Pure: events in, actions out, the time is given.

It keeps that a session has at most one route, that a route's token was confirmed
by the lease store and is the highest ever seen, and that a frame only ever goes
to the other end of its own channel. Everything that takes time (asking the store,
sending) is an action for the server, whose answer comes back as an event.
"""

from __future__ import annotations

import json
from typing import Any

from cmdop_migrate.relay.channels import Budget, Channel, Claim, Client, Entry, Flow, Host, Route
from cmdop_migrate.relay.frames import PAYLOAD_MAX, Frame, FrameError, Kind, with_table
from cmdop_migrate.relay.signals import (
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

OPENING_MAX = 4096
INFO_MAX = 2048
NAME_MAX = 63
CONFIRMATIONS_PER_TTL = 3
ASK_AGAIN = 10.0  # seconds: whether a session that clients wait for still exists
_NO_SESSION = ("no_session", "no session of this identity that this credential is for")
_LEAVING = {"moving": "moved", "parked": "moved", "exited": "exited", "fenced": "lost"}


class Switchboard:
    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.clients: dict[int, Client] = {}
        self.hosts: dict[int, Host] = {}
        self.entries: dict[str, Entry] = {}

    def handle(self, event: Event, now: float) -> list[Action]:
        """What is to be done about it, in order."""
        match event:
            case Received(conn, frame):
                try:
                    return self._received(conn, frame, now)
                except FrameError as error:
                    return [End(conn, "protocol", str(error))]
            case Joined(conn, claims):
                return self._joined(conn, claims.kind == "host", event, now)
            case Left(conn):
                return self._left(conn)
            case Answered(session, answer):
                return self._answered(session, answer, now)
            case NotKept(session):
                if session in self.entries:
                    self.entries[session].kept = None
                return []
            case Ticked():
                return self._ticked(now)

    # Coming and going

    def _joined(self, conn: int, is_host: bool, event: Joined, now: float) -> list[Action]:
        limits, claims = self.limits, event.claims
        others = self.hosts.values() if is_host else self.clients.values()
        most = limits.host_connections if is_host else limits.client_connections
        if sum(one.claims.id == claims.id for one in others) >= most:
            return [End(conn, "too_many", f"more than {most} connections with one credential")]
        if is_host:
            self.hosts[conn] = Host(conn, claims)
        else:
            self.clients[conn] = Client(conn, claims, Budget(limits.requests, limits.refill, limits.requests, now))
        facts = {"name": claims.name, "role": claims.role, "window": limits.window, "beat": limits.beat}
        return [Send(conn, with_table(Kind.WELCOME, facts))]

    def _left(self, conn: int) -> list[Action]:
        actions: list[Action] = []
        client = self.clients.pop(conn, None)
        if client is not None:
            for channel in list(client.channels.values()):
                actions += self._to_host(channel, _close(channel, "gone", "the client's connection ended"))
                self._drop(channel)
        host = self.hosts.pop(conn, None)
        if host is not None:
            for session in list(host.sessions):
                entry = self.entries.get(session)
                if entry is not None and entry.route is not None and entry.route.conn == conn:
                    actions += self._take_out(entry, "lost", "the host's connection ended")
        return actions

    # Frames

    def _received(self, conn: int, frame: Frame, now: float) -> list[Action]:
        if frame.kind is Kind.BEAT:
            return []
        client, host = self.clients.get(conn), self.hosts.get(conn)
        if client is not None:
            match frame.kind:
                case Kind.DATA | Kind.CREDIT | Kind.CLOSE:
                    return self._from_client(client, frame)
                case Kind.OPEN | Kind.LIST:
                    if not client.budget.spend(now):
                        return [End(conn, "too_many", "too many requests")]
                    return self._open(client, frame, now) if frame.kind is Kind.OPEN else self._list(client)
        elif host is not None:
            match frame.kind:
                case Kind.DATA | Kind.CREDIT | Kind.CLOSE:
                    return self._from_host(host, frame)
                case Kind.REGISTER:
                    return self._register(host, frame, now)
                case Kind.LEAVE:
                    return self._leave(host, frame)
        else:
            return []  # it is being ended
        raise FrameError(f"{frame.kind.name} does not come from there")

    def _from_client(self, client: Client, frame: Frame) -> list[Action]:
        channel = client.channels.get(frame.channel)
        if channel is None:
            return []  # closed meanwhile
        if channel.host is None and frame.kind is not Kind.CLOSE:
            return self._break(channel, "the channel is not open yet")
        return self._pass_on(channel, frame, channel.to_host, channel.to_client, self._to_host)

    def _from_host(self, host: Host, frame: Frame) -> list[Action]:
        channel = host.channels.get(frame.channel)
        if channel is None:
            return []  # closed meanwhile
        return self._pass_on(channel, frame, channel.to_client, channel.to_host, self._to_client)

    def _pass_on(self, channel: Channel, frame: Frame, ahead: Flow, back: Flow, forward: Any) -> list[Action]:
        """`ahead` is the direction the frame goes in; credit is for the other."""
        if frame.session not in ("", channel.session) or frame.token not in (0, channel.token):
            return self._break(channel, "a frame about another session or token")
        if frame.kind is Kind.DATA:
            if not ahead.take(frame.seq, len(frame.payload)):
                return self._break(channel, "data out of turn, or without credit")
        elif frame.kind is Kind.CREDIT:
            if not back.give(frame.credit()):
                return self._break(channel, "credit for what was never sent")
        else:
            frame = _close(channel, frame.text("code", "closed")[:40], frame.text("why", "")[:200])
            actions = forward(channel, frame)
            self._drop(channel)
            return list(actions)
        return list(forward(channel, frame))

    def _to_client(self, channel: Channel, frame: Frame) -> list[Action]:
        whole = Frame(frame.kind, channel.session, channel.token, frame.seq, channel.number, frame.payload)
        return [Send(channel.client, whole)]

    def _to_host(self, channel: Channel, frame: Frame) -> list[Action]:
        if channel.host is None:
            return []
        whole = Frame(frame.kind, channel.session, channel.token, frame.seq, channel.host_number, frame.payload)
        return [Send(channel.host, whole)]

    def _break(self, channel: Channel, why: str) -> list[Action]:
        frame = _close(channel, "protocol", why)
        actions = [*self._to_client(channel, frame), *self._to_host(channel, frame)]
        actions.append(Note("relay_channel_broken", channel.session, {"why": why}))
        self._drop(channel)
        return actions

    def _drop(self, channel: Channel) -> None:
        """Every trace of it."""
        client = self.clients.get(channel.client)
        if client is not None and client.channels.get(channel.number) is channel:
            del client.channels[channel.number]
        host = self.hosts.get(channel.host) if channel.host is not None else None
        if host is not None:
            host.channels.pop(channel.host_number, None)
        entry = self.entries.get(channel.session)
        if entry is not None:
            entry.waiting.pop((channel.client, channel.number), None)
            if entry.route is not None:
                entry.route.channels.pop((channel.client, channel.number), None)
            self._forget(entry)

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
            return [Send(client.conn, _refused("too_many", why, session, channel=number))]
        window = self.limits.window
        channel = Channel(client.conn, number, session, frame.payload, Flow(window, window), Flow(window, window))
        client.channels[number] = channel
        entry = self._entry(session)
        if entry.route is not None and client.claims.covers(session, entry.name):
            return self._join(entry, entry.route, channel)
        # Unknown and not allowed take the same way, and the same time: the store is asked about both.
        return self._ask(entry, channel, now)

    def _join(self, entry: Entry, route: Route, channel: Channel) -> list[Action]:
        host = self.hosts[route.conn]
        host.last = number = host.last % (2**32 - 1) + 1
        while number in host.channels:
            host.last = number = host.last % (2**32 - 1) + 1
        channel.host, channel.host_number, channel.token = host.conn, number, route.token
        host.channels[number] = channel
        route.channels[channel.client, channel.number] = channel
        entry.waiting.pop((channel.client, channel.number), None)
        opening = Frame(Kind.OPEN, payload=channel.opening)
        channel.opening = b""
        return [Send(channel.client, _status(entry, channel)), *self._to_host(channel, opening)]

    def _decide(self, entry: Entry, channel: Channel, answer: Answer) -> list[Action]:
        """What an OPEN that waited for the store's word gets."""
        client = self.clients.get(channel.client)
        if client is None or client.channels.get(channel.number) is not channel:
            return []  # it was closed, or its client left
        if channel.host is not None:
            return []
        if entry.route is not None and client.claims.covers(entry.session, entry.name):
            return self._join(entry, entry.route, channel)
        if answer == "silent":
            return self._refuse(channel, "unavailable", "the lease store does not answer")
        if isinstance(answer, str) or not client.claims.covers(entry.session, entry.name):
            return self._refuse(channel, *_NO_SESSION)
        if answer.over:
            return self._refuse(channel, "exited", "the session has ended")
        key = channel.client, channel.number
        if key in entry.waiting:
            return []
        entry.waiting[key] = channel
        return [Send(channel.client, _status(entry, channel))]

    def _refuse(self, channel: Channel, code: str, why: str) -> list[Action]:
        self._drop(channel)
        client = self.clients[channel.client].claims
        return [
            Send(channel.client, _refused(code, why, channel.session, channel=channel.number)),
            Note("relay_open_refused", channel.session, {"code": code, "actor": client.name, "credential": client.id}),
        ]

    def _list(self, client: Client) -> list[Action]:
        shown = [_listed(one) for one in self.entries.values() if one.highest and _covers(client, one)]
        pages: list[list[dict[str, Any]]] = [[]]
        size = 0
        for one in shown:
            cost = len(json.dumps(one, ensure_ascii=False).encode()) + 2
            if size + cost > PAYLOAD_MAX - 1024:
                pages.append([])
                size = 0
            pages[-1].append(one)
            size += cost
        return [
            Send(client.conn, with_table(Kind.LISTING, {"sessions": page, "more": page is not pages[-1]}))
            for page in pages
        ]

    # Hosts

    def _register(self, host: Host, frame: Frame, now: float) -> list[Action]:
        session, token = frame.session, frame.token
        if not session or not token:
            raise FrameError("REGISTER needs a session and a token")
        claim = _claim(host, frame)
        if session not in host.sessions and len(host.sessions) >= self.limits.sessions:
            why = f"more than {self.limits.sessions} sessions of one host"
            return [Send(host.conn, _refused("too_many", why, session, token))]
        entry = self._entry(session)
        if token < entry.highest:
            return self._reject(host, session, token, "fenced", f"token {entry.highest} has been seen")
        route = entry.route
        if route is not None and route.conn == host.conn and route.token == token:
            route.state, route.info, entry.name = claim.state, claim.info, claim.name
            return [Send(host.conn, Frame(Kind.REGISTERED, session, token))]
        host.sessions.add(session)
        for waiters in (entry.asking or [], entry.later):
            waiters[:] = [one for one in waiters if not (isinstance(one, Claim) and one.conn == host.conn)]
        return self._ask(entry, claim, now)

    def _reject(self, host: Host, session: str, token: int, code: str, why: str) -> list[Action]:
        host.sessions.discard(session)
        facts = {"code": code, "by": host.claims.name, "token": token, "credential": host.claims.id}
        return [
            Send(host.conn, _refused(code, why, session, token)),
            Note("relay_register_refused", session, facts),
        ]

    def _leave(self, host: Host, frame: Frame) -> list[Action]:
        state, to = frame.text("state"), frame.text("to", "")[:NAME_MAX]
        if state not in _LEAVING:
            raise FrameError("LEAVE with an unknown state")
        entry = self.entries.get(frame.session)
        if entry is None or (entry.route is not None and entry.route.token != frame.token):
            return []
        for waiters in (entry.asking or [], entry.later):
            waiters[:] = [one for one in waiters if not (isinstance(one, Claim) and one.conn == host.conn)]
        if entry.route is None or entry.route.conn != host.conn:
            host.sessions.discard(frame.session)
            return []
        actions = self._take_out(entry, _LEAVING[state], f"the session is {state}", state, to)
        return [*actions, Note("relay_left", entry.session, {"token": frame.token, "state": state, "to": to})]

    def _settle(self, entry: Entry, claim: Claim, answer: Answer) -> list[Action]:
        """What a REGISTER that waited for the store's word gets."""
        host = self.hosts.get(claim.conn)
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
            return self._reject(host, session, token, "not_confirmed", f"the lease says: {answer.state}")
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
            if _covers(self.clients[channel.client], entry):
                actions += self._join(entry, entry.route, channel)
        return actions

    def _take_out(self, entry: Entry, code: str, why: str, state: str = "waiting", to: str = "") -> list[Action]:
        """There is no route any more. Both ends of its channels hear of it, while they are there."""
        route = entry.route
        assert route is not None
        entry.route, entry.state, entry.to = None, state, to
        actions: list[Action] = []
        for channel in list(route.channels.values()):
            frame = _close(channel, code, why)
            actions += self._to_client(channel, frame)
            if route.conn in self.hosts:
                actions += self._to_host(channel, frame)
            self._drop(channel)
        host = self.hosts.get(route.conn)
        if host is not None:
            host.sessions.discard(entry.session)
        self._forget(entry)
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
        entry = self.entries.get(session)
        if entry is None or entry.asking is None:
            return []
        waiters, entry.asking = entry.asking, []  # still in use, until all is said
        actions = self._confirm(entry, answer)
        for one in [*waiters, *entry.waiting.values()]:
            if isinstance(one, Claim):
                actions += self._settle(entry, one, answer)
        for one in [*waiters, *entry.waiting.values()]:
            if isinstance(one, Channel) and not (answer == "silent" and one in entry.waiting.values()):
                actions += self._decide(entry, one, answer)
        entry.asking = None
        if entry.later:
            later, entry.later = entry.later, []
            return actions + self._ask_now(entry, later, now)
        self._forget(entry)
        return actions

    def _confirm(self, entry: Entry, answer: Answer) -> list[Action]:
        """What the store's word means for the route there is."""
        if isinstance(answer, Standing):
            entry.highest = max(entry.highest, answer.token)
            entry.name = entry.name or answer.name
        route = entry.route
        if route is None or answer == "silent":
            return []
        if isinstance(answer, Standing) and (answer.state, answer.host, answer.token) == (
            "held", route.host, route.token
        ):  # fmt: skip
            route.confirmed, route.ttl = entry.asked, answer.ttl
            return []
        replaced = isinstance(answer, Standing) and answer.token > route.token
        code, why = ("fenced", "a newer token was given") if replaced else ("not_confirmed", "the lease is not held")
        actions = self._take_out(entry, "moved" if replaced else "lost", why)
        host = self.hosts.get(route.conn)
        return actions + (self._reject(host, entry.session, route.token, code, why) if host else [])

    def _ticked(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for entry in list(self.entries.values()):
            route = entry.route
            if route is not None and now - route.confirmed >= route.ttl:
                why = "the lease store does not answer"
                actions += self._take_out(entry, "lost", why)
                host = self.hosts.get(route.conn)
                if host is not None:
                    actions += self._reject(host, entry.session, route.token, "unavailable", why)
            elif route is not None or entry.waiting:
                pause = route.ttl / CONFIRMATIONS_PER_TTL if route is not None else ASK_AGAIN
                # Those that came at once, after a restart, are not to be asked about at once for ever.
                pause *= 0.75 + 0.25 * int(entry.session[:2], 16) / 255
                if entry.asking is None and now - entry.asked >= pause:
                    actions += self._ask_now(entry, [], now)
        return actions

    # Entries

    def _entry(self, session: str) -> Entry:
        found = self.entries.get(session)
        if found is None:
            found = self.entries[session] = Entry(session)
        return found

    def _forget(self, entry: Entry) -> None:
        """What nobody uses is kept for listings only while there is room; what never was, not at all. Safe, because
        the lease store has the truth: a token that was forgotten is asked about again."""
        if entry.in_use or self.entries.get(entry.session) is not entry:
            return
        del self.entries[entry.session]
        if entry.highest and entry.name is not None:
            self.entries[entry.session] = entry  # at the end: the oldest go first
            if len(self.entries) > self.limits.remembered:
                oldest = next((one for one in self.entries.values() if not one.in_use), None)
                if oldest is not None:
                    del self.entries[oldest.session]


def _claim(host: Host, frame: Frame) -> Claim:
    table = frame.table()
    info = table.get("info", {})
    name, state = frame.text("name"), frame.text("state", "running")
    if not 0 < len(name) <= NAME_MAX or not name.isprintable() or len(state) > 40:
        raise FrameError("REGISTER with a bad name or state")
    if not isinstance(info, dict) or len(json.dumps(info)) > INFO_MAX:
        raise FrameError(f"REGISTER with an info of more than {INFO_MAX} bytes, or none")
    return Claim(host.conn, frame.token, name, state, info)


def _covers(client: Client, entry: Entry) -> bool:
    return client.claims.covers(entry.session, entry.name)


def _listed(entry: Entry) -> dict[str, Any]:
    route = entry.route
    return {
        "session": entry.session,
        "name": entry.name,
        "host": route.host if route else None,
        "to": entry.to or None,
        "state": route.state if route else entry.state,
        "routed": route is not None,
        "token": route.token if route else entry.highest,
        "clients": len(route.channels) if route else len(entry.waiting),
        "info": route.info if route else {},
    }


def _status(entry: Entry, channel: Channel) -> Frame:
    route = entry.route
    state = "routed" if route else entry.state
    facts = {"state": state, "host": route.host if route else None, "to": entry.to or None}
    token = route.token if route else entry.highest
    return with_table(Kind.STATUS, {**facts, "token": token}, channel.session, token, channel.number)


def _close(channel: Channel, code: str, why: str) -> Frame:
    return with_table(Kind.CLOSE, {"code": code, "why": why}, channel.session, channel.token)


def _refused(code: str, why: str, session: str = "", token: int = 0, channel: int = 0) -> Frame:
    return with_table(Kind.REFUSED, {"code": code, "why": why}, session, token, channel)
