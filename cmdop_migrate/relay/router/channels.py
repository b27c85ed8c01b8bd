"""The patch bay: channels plugged between clients and hosts, and what passes through them. Pure.

It decides nothing about who may be joined to whom (that is the switchboard's); it keeps
that a frame only ever goes to the other end of its own channel, in its turn and paid for.
"""

from __future__ import annotations

from cmdop_migrate.relay.frames import CHANNEL_MAX, Frame, Kind
from cmdop_migrate.relay.router import replies
from cmdop_migrate.relay.router.router_events import Action, Note, Send
from cmdop_migrate.relay.router.routing_state import Channel, Client, Entry, Flow, Host, Route

CODE_MAX = 40
WHY_MAX = 200


class Patchbay:
    def __init__(self, window: int, remembered: int) -> None:
        self.clients: dict[int, Client] = {}
        self.hosts: dict[int, Host] = {}
        self.entries: dict[str, Entry] = {}
        self._window, self._remembered = window, remembered

    def entry(self, session: str) -> Entry:
        found = self.entries.get(session)
        if found is None:
            found = self.entries[session] = Entry(session)
        return found

    def forget(self, entry: Entry) -> None:
        """What nobody uses is kept for listings only while there is room; what never was, not at all. Safe, because
        the lease store has the truth: a token that was forgotten is asked about again."""
        if entry.in_use or self.entries.get(entry.session) is not entry:
            return
        del self.entries[entry.session]
        if entry.highest and entry.name is not None:
            self.entries[entry.session] = entry  # at the end: the oldest go first
            if len(self.entries) > self._remembered:
                oldest = next((one for one in self.entries.values() if not one.in_use), None)
                if oldest is not None:
                    del self.entries[oldest.session]

    def plug(self, client: Client, frame: Frame) -> Channel:
        """A new channel of this client's, that leads nowhere yet."""
        window = self._window
        channel = Channel(
            client.conn, frame.channel, frame.session, frame.payload, Flow(window, window), Flow(window, window)
        )
        client.channels[frame.channel] = channel
        return channel

    def is_plugged(self, channel: Channel) -> bool:
        client = self.clients.get(channel.client)
        return client is not None and client.channels.get(channel.number) is channel

    def join(self, entry: Entry, route: Route, channel: Channel) -> list[Action]:
        """From now on it leads to this incarnation."""
        host = self.hosts[route.conn]
        number = host.last % CHANNEL_MAX + 1
        while number in host.channels:
            number = number % CHANNEL_MAX + 1
        host.last = number
        channel.host, channel.host_number, channel.token = host.conn, number, route.token
        host.channels[number] = channel
        route.channels[channel.client, channel.number] = channel
        entry.waiting.pop((channel.client, channel.number), None)
        opening, channel.opening = Frame(Kind.OPEN, payload=channel.opening), b""
        return [Send(channel.client, replies.status(entry, channel)), *self.to_host(channel, opening)]

    def pull(self, channel: Channel) -> None:
        """Every trace of it goes."""
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
            self.forget(entry)

    def from_client(self, client: Client, frame: Frame) -> list[Action]:
        channel = client.channels.get(frame.channel)
        if channel is None:
            return []  # closed meanwhile
        if channel.host is None and frame.kind is not Kind.CLOSE:
            return self._break(channel, "the channel is not open yet")
        return self._pass(channel, frame, ahead=True)

    def from_host(self, host: Host, frame: Frame) -> list[Action]:
        channel = host.channels.get(frame.channel)
        return [] if channel is None else self._pass(channel, frame, ahead=False)

    def cut(self, channel: Channel, code: str, why: str) -> list[Action]:
        """Both ends hear that it is over."""
        frame = replies.close(code, why)
        actions = [*self.to_client(channel, frame), *self.to_host(channel, frame)]
        self.pull(channel)
        return actions

    def to_client(self, channel: Channel, frame: Frame) -> list[Action]:
        if channel.client not in self.clients:
            return []
        whole = Frame(frame.kind, channel.session, channel.token, frame.seq, channel.number, frame.payload)
        return [Send(channel.client, whole)]

    def to_host(self, channel: Channel, frame: Frame) -> list[Action]:
        if channel.host is None or channel.host not in self.hosts:
            return []
        whole = Frame(frame.kind, channel.session, channel.token, frame.seq, channel.host_number, frame.payload)
        return [Send(channel.host, whole)]

    def _pass(self, channel: Channel, frame: Frame, ahead: bool) -> list[Action]:
        """DATA, CREDIT or CLOSE to the other end; `ahead`: from the client to the host."""
        if frame.session not in ("", channel.session) or frame.token not in (0, channel.token):
            return self._break(channel, "a frame about another session or token")
        onward = self.to_host if ahead else self.to_client
        sent, received = (channel.to_host, channel.to_client) if ahead else (channel.to_client, channel.to_host)
        if frame.kind is Kind.DATA:
            if not sent.take(frame.seq, len(frame.payload)):
                return self._break(channel, "data out of turn, or without credit")
        elif frame.kind is Kind.CREDIT:
            if not received.give(frame.credit()):
                return self._break(channel, "credit for what was never sent")
        else:
            said = replies.close(frame.text("code", "closed")[:CODE_MAX], frame.text("why", "")[:WHY_MAX])
            actions = onward(channel, said)
            self.pull(channel)
            return actions
        return onward(channel, frame)

    def _break(self, channel: Channel, why: str) -> list[Action]:
        note = Note("relay_channel_broken", channel.session, {"code": "protocol", "why": why})
        return [*self.cut(channel, "protocol", why), note]
