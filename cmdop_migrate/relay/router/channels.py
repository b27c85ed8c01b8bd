"""Keep the table of channels between clients and hosts, and the frames that pass through them. Pure.

It does not decide which channel leads where (the router does). It guarantees that a frame
goes only to the other end of its own channel, in order and within the receiver's credit.
"""

from __future__ import annotations

from cmdop_migrate.relay.frames import CHANNEL_MAX, Frame, Kind
from cmdop_migrate.relay.router import replies
from cmdop_migrate.relay.router.router_events import Action, Note, Send
from cmdop_migrate.relay.router.routing_state import Channel, Client, Entry, Flow, Host, Route

CODE_MAX = 40
WHY_MAX = 200


class ChannelTable:
    """Keep connections, known sessions, and the channels between them."""

    def __init__(self, window: int, remembered: int) -> None:
        self.clients: dict[int, Client] = {}
        self.hosts: dict[int, Host] = {}
        self.entries: dict[str, Entry] = {}
        self._window, self._remembered = window, remembered

    def entry(self, session: str) -> Entry:
        """Return the entry of a session; create it if needed."""
        entry = self.entries.get(session)
        if entry is None:
            entry = self.entries[session] = Entry(session)
        return entry

    def forget(self, entry: Entry) -> None:
        """Drop an entry that is not in use. Entries of sessions that exist are kept for listings while there is room.
        Dropping is safe: the lease store is authoritative, and is asked again about a token that was dropped."""
        if entry.in_use or self.entries.get(entry.session) is not entry:
            return
        del self.entries[entry.session]
        if entry.highest and entry.name is not None:
            self.entries[entry.session] = entry  # at the end: the oldest are dropped first
            if len(self.entries) > self._remembered:
                oldest = next((unused for unused in self.entries.values() if not unused.in_use), None)
                if oldest is not None:
                    del self.entries[oldest.session]

    def add(self, client: Client, frame: Frame) -> Channel:
        """Add a channel of this client, which is not joined to a host yet."""
        window = self._window
        channel = Channel(
            client.conn, frame.channel, frame.session, frame.payload, Flow(window, window), Flow(window, window)
        )
        client.channels[frame.channel] = channel
        return channel

    def is_open(self, channel: Channel) -> bool:
        """Return whether the client still has this channel."""
        client = self.clients.get(channel.client)
        return client is not None and client.channels.get(channel.number) is channel

    def join(self, entry: Entry, route: Route, channel: Channel) -> list[Action]:
        """Join a channel to the incarnation that is routed."""
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

    def remove(self, channel: Channel) -> None:
        """Remove a channel from all tables."""
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
        """Forward a frame from a client to the host of its channel."""
        channel = client.channels.get(frame.channel)
        if channel is None:
            return []  # the channel was closed meanwhile
        if channel.host is None and frame.kind is not Kind.CLOSE:
            return self._break(channel, "the channel is not open yet")
        return self._forward(channel, frame, inward=True)

    def from_host(self, host: Host, frame: Frame) -> list[Action]:
        """Forward a frame from a host to the client of its channel."""
        channel = host.channels.get(frame.channel)
        return [] if channel is None else self._forward(channel, frame, inward=False)

    def cut(self, channel: Channel, code: str, why: str) -> list[Action]:
        """Close a channel, and tell both ends."""
        frame = replies.close(code, why)
        actions = [*self.to_client(channel, frame), *self.to_host(channel, frame)]
        self.remove(channel)
        return actions

    def to_client(self, channel: Channel, frame: Frame) -> list[Action]:
        """Send a frame to the client of a channel, under the client's channel number."""
        if channel.client not in self.clients:
            return []
        whole = Frame(frame.kind, channel.session, channel.token, frame.seq, channel.number, frame.payload)
        return [Send(channel.client, whole)]

    def to_host(self, channel: Channel, frame: Frame) -> list[Action]:
        """Send a frame to the host of a channel, under the host's channel number."""
        if channel.host is None or channel.host not in self.hosts:
            return []
        whole = Frame(frame.kind, channel.session, channel.token, frame.seq, channel.host_number, frame.payload)
        return [Send(channel.host, whole)]

    def _forward(self, channel: Channel, frame: Frame, inward: bool) -> list[Action]:
        """Forward DATA, CREDIT or CLOSE to the other end; `inward`: from the client to the host."""
        if frame.session not in ("", channel.session) or frame.token not in (0, channel.token):
            return self._break(channel, "a frame about another session or token")
        onward = self.to_host if inward else self.to_client
        sent, received = (channel.to_host, channel.to_client) if inward else (channel.to_client, channel.to_host)
        if frame.kind is Kind.DATA:
            if not sent.take(frame.seq, len(frame.payload)):
                return self._break(channel, "data out of order, or without credit")
        elif frame.kind is Kind.CREDIT:
            if not received.give(frame.credit()):
                return self._break(channel, "credit for bytes that were never sent")
        else:
            closing = replies.close(frame.text("code", "closed")[:CODE_MAX], frame.text("why", "")[:WHY_MAX])
            actions = onward(channel, closing)
            self.remove(channel)
            return actions
        return onward(channel, frame)

    def _break(self, channel: Channel, why: str) -> list[Action]:
        note = Note("relay_channel_broken", channel.session, {"code": "protocol", "why": why})
        return [*self.cut(channel, "protocol", why), note]
