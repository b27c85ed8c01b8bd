"""The holder's side of its clients: each reads the output at its own pace, from its own position.

No client has a buffer that grows: a cursor into the ring is all a slow one
costs, and when the ring has moved on it is told how much it missed. Stdlib
only: the holder loads this.
"""

from __future__ import annotations

import resource
import select
import socket
import time
from collections.abc import Callable

from cmdop_migrate.holder import protocol
from cmdop_migrate.holder.output_ring import Ring

MAX_CLIENTS = 512
MAX_UNSENT = 4 << 20
READ_SIZE = 8 << 10  # in one go: input of one may be work, and others wait meanwhile
WAIT = 0.01  # seconds, before one that cannot be let in is looked at again


class Client:
    """One connection. `cursor` is None until it asks for output."""

    def __init__(self, sock: socket.socket, number: int = 0) -> None:
        self.sock = sock
        self.number = number  # of this connection: unlike `fd`, no later one gets it again
        self.fd = sock.fileno()  # stays readable after the socket is closed
        self.decoder = protocol.Decoder()
        self.unsent = bytearray()
        self.cursor: int | None = None
        self.actor = ""
        self.stream: str | None = None  # what it types is numbered, and may come twice
        self.read_only = False
        self.attached = False
        self.blocked = False
        self.lost = 0  # bytes that were no longer kept when it was ready for them
        self.refused, self.refused_at = 0, 0.0  # bytes that were refused and not yet said; when it was last


class Clients:
    def __init__(self, epoll: select.epoll, ring: Ring, on_left: Callable[[Client], None] = lambda _: None) -> None:
        """`on_left` hears of each that was attached and is no more, whoever hung up."""
        self._epoll, self._ring, self._on_left = epoll, ring, on_left
        self._all: dict[int, Client] = {}
        self._accepted = 0
        self.left = 0.0  # when the last one that was attached went
        # Descriptors are kept back for the holder's own work: running out of them must never end a session.
        self._most = max(1, min(MAX_CLIENTS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64))

    def get(self, fd: int) -> Client | None:
        return self._all.get(fd)

    def find(self, number: int) -> Client | None:
        """Return the client with this number; None: its connection has closed."""
        return next((client for client in self._all.values() if client.number == number), None)

    def attached(self) -> int:
        return sum(client.attached for client in self._all.values())

    def accept(self, listener: socket.socket) -> None:
        """One more, if the machine has what it takes: that it has not must never end a session either."""
        try:
            sock, _ = listener.accept()
        except OSError:  # no memory, or no descriptors in all of the machine: it stays in line
            time.sleep(WAIT)
            return
        if len(self._all) >= self._most:
            sock.close()
            return
        try:
            sock.setblocking(False)
            self._epoll.register(sock.fileno(), select.EPOLLIN)
        except OSError:  # of what is watched there is a most, for a user and in all
            sock.close()
            return
        self._accepted += 1
        self._all[sock.fileno()] = Client(sock, self._accepted)

    def read(self, client: Client) -> list[tuple[int, bytes]]:
        """Whole frames that have arrived; drops the client at its end or on nonsense."""
        try:
            data = client.sock.recv(READ_SIZE)
            if data:
                return client.decoder.feed(data)
        except BlockingIOError:
            return []
        except (OSError, protocol.ProtocolError):
            pass
        self.drop(client)
        return []

    def say(self, client: Client, message: dict[str, object]) -> None:
        client.unsent += protocol.control(message)
        self.pump(client)

    def tell_all(self, message: dict[str, object], most: int = MAX_UNSENT) -> None:
        """To everyone who follows the output, and has not got more than `most` bytes to read already."""
        for client in list(self._all.values()):
            if client.cursor is not None and len(client.unsent) <= most:
                self.say(client, message)

    def pump_all(self) -> None:
        for client in list(self._all.values()):
            if client.cursor is not None:
                self.pump(client)

    def pump(self, client: Client) -> None:
        """Sends what the client takes now and no more; asks to be woken for the rest."""
        try:
            while self._refill(client):
                sent = client.sock.send(client.unsent)
                del client.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.drop(client)
            return
        if len(client.unsent) > MAX_UNSENT:
            self.drop(client)  # asks and asks, and never reads an answer
            return
        self._watch(client)

    def _refill(self, client: Client) -> bool:
        if not client.unsent and client.cursor is not None:
            if client.cursor < self._ring.start:
                lost = {"event": "lost", "bytes": self._ring.start - client.cursor, "from": client.cursor}
                client.unsent += protocol.control(lost)
                client.lost += self._ring.start - client.cursor
                client.cursor = self._ring.start
            data = self._ring.read(client.cursor, protocol.OUTPUT_STEP)
            if data:
                client.unsent += protocol.output(client.cursor, data)
                client.cursor += len(data)
        return bool(client.unsent)

    def _watch(self, client: Client) -> None:
        if self._all.get(client.fd) is not client:
            return  # dropped meanwhile
        events = (0 if client.blocked else select.EPOLLIN) | (select.EPOLLOUT if client.unsent else 0)
        self._epoll.modify(client.sock.fileno(), events)

    def block(self, client: Client) -> None:
        """Stops reading a client that types faster than the session reads; the socket holds the rest."""
        client.blocked = True
        self._watch(client)

    def unblock(self) -> None:
        for client in self._all.values():
            if client.blocked:
                client.blocked = False
                self._watch(client)

    def drop(self, client: Client) -> None:
        if self._all.pop(client.sock.fileno(), None) is not None:
            self._epoll.unregister(client.sock.fileno())
            client.sock.close()
            if client.attached:
                self.left = time.monotonic()
                self._on_left(client)

    def farewell(self, message: dict[str, object], seconds: float) -> None:
        """The last output and this message to everyone who reads within `seconds`."""
        until = time.monotonic() + seconds
        waiting = list(self._all.values())
        while waiting and time.monotonic() < until:
            for client in waiting:
                client.sock.setblocking(False)
                self.pump(client)
            waiting = [one for one in waiting if one.sock.fileno() >= 0 and (one.unsent or not self._caught_up(one))]
            if waiting:
                select.select([], [one.sock for one in waiting], [], 0.05)
        for client in list(self._all.values()):
            # One that has not read all hears no farewell: to take it for the end would hide what it missed.
            if not client.unsent and self._caught_up(client):
                client.unsent += protocol.control(message)
                self.pump(client)
            client.attached = False  # the session leaves it, not it the session
            self.drop(client)

    def _caught_up(self, client: Client) -> bool:
        return client.cursor is None or client.cursor >= self._ring.end
