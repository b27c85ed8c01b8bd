"""Serve the holder's clients: each reads the output at its own pace, from its own position.

No client has a buffer that grows: a slow one costs no more than a cursor into
the ring. When the ring has evicted bytes that a client has not read, the client
learns how many it missed.
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
READ_SIZE = 8 << 10  # per read: handling one client's input takes time, in which the others wait
ACCEPT_PAUSE = 0.01  # seconds, after a connection that could not be accepted


class Client:
    """Hold the state of one connection. `cursor` is None until the client asks for output."""

    def __init__(self, sock: socket.socket, number: int = 0) -> None:
        self.sock = sock
        self.number = number  # of this connection: unlike `fd`, no later one gets it again
        self.fd = sock.fileno()  # stays readable after the socket is closed
        self.decoder = protocol.Decoder()
        self.unsent = bytearray()
        self.cursor: int | None = None
        self.actor = ""
        self.stream: str | None = None  # its input is numbered, and may arrive twice
        self.read_only = False
        self.attached = False
        self.blocked = False
        self.lost = 0  # bytes that the ring had evicted before it read them
        self.refused, self.refused_at = 0, 0.0  # bytes refused and not reported yet; time of the last refusal


class Clients:
    """Hold all connections of one holder."""

    def __init__(self, epoll: select.epoll, ring: Ring, on_left: Callable[[Client], None] = lambda _: None) -> None:
        """Call `on_left` for each attached client whose connection closes, by either side."""
        self._epoll, self._ring, self._on_left = epoll, ring, on_left
        self._all: dict[int, Client] = {}
        self._accepted = 0
        self.left = 0.0  # when the last attached terminal left
        # Some descriptors are reserved for the holder's own work: running out of them must never end a session.
        self._most = max(1, min(MAX_CLIENTS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64))

    def get(self, fd: int) -> Client | None:
        """Return the client with this descriptor, or None."""
        return self._all.get(fd)

    def find(self, number: int) -> Client | None:
        """Return the client with this number; None: its connection has closed."""
        return next((client for client in self._all.values() if client.number == number), None)

    def attached(self) -> int:
        """Return how many terminals are attached."""
        return sum(client.attached for client in self._all.values())

    def accept(self, listener: socket.socket) -> None:
        """Accept one connection, if the machine has the resources: running out of them must never end a session."""
        try:
            sock, _ = listener.accept()
        except OSError:  # out of memory or descriptors on this machine: the connection waits in the listener's queue
            time.sleep(ACCEPT_PAUSE)
            return
        if len(self._all) >= self._most:
            sock.close()
            return
        try:
            sock.setblocking(False)
            self._epoll.register(sock.fileno(), select.EPOLLIN)
        except OSError:  # the kernel limits how many descriptors epoll watches, per user
            sock.close()
            return
        self._accepted += 1
        self._all[sock.fileno()] = Client(sock, self._accepted)

    def read(self, client: Client) -> list[tuple[int, bytes]]:
        """Return the whole frames that have arrived. Drop the client at the end of its stream, and if it sends no
        frames."""
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
        """Send a message to one client."""
        client.unsent += protocol.control(message)
        self.pump(client)

    def tell_all(self, message: dict[str, object], most: int = MAX_UNSENT) -> None:
        """Send a message to all clients that follow the output and have at most `most` bytes still to read."""
        for client in list(self._all.values()):
            if client.cursor is not None and len(client.unsent) <= most:
                self.say(client, message)

    def pump_all(self) -> None:
        """Send new output to all clients that follow it."""
        for client in list(self._all.values()):
            if client.cursor is not None:
                self.pump(client)

    def pump(self, client: Client) -> None:
        """Send what the client has room for now; poll for the rest."""
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
            self.drop(client)  # it sends requests and never reads an answer
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
        """Stop reading from a client that types faster than the session reads; its socket buffers the rest."""
        client.blocked = True
        self._watch(client)

    def unblock(self) -> None:
        """Read from all clients again."""
        for client in self._all.values():
            if client.blocked:
                client.blocked = False
                self._watch(client)

    def drop(self, client: Client) -> None:
        """Close a connection."""
        if self._all.pop(client.sock.fileno(), None) is not None:
            self._epoll.unregister(client.sock.fileno())
            client.sock.close()
            if client.attached:
                self.left = time.monotonic()
                self._on_left(client)

    def farewell(self, message: dict[str, object], seconds: float) -> None:
        """Send the last output and then this message to all clients that read within `seconds`; close all
        connections."""
        until = time.monotonic() + seconds
        waiting = list(self._all.values())
        while waiting and time.monotonic() < until:
            for client in waiting:
                client.sock.setblocking(False)
                self.pump(client)
            waiting = [
                slow for slow in waiting if slow.sock.fileno() >= 0 and (slow.unsent or not self._caught_up(slow))
            ]
            if waiting:
                select.select([], [slow.sock for slow in waiting], [], 0.05)
        for client in list(self._all.values()):
            # A client that has not read all output gets no exit event: it would take it for the end, and miss the rest.
            if not client.unsent and self._caught_up(client):
                client.unsent += protocol.control(message)
                self.pump(client)
            client.attached = False  # it did not leave: the session ended
            self.drop(client)

    def _caught_up(self, client: Client) -> bool:
        return client.cursor is None or client.cursor >= self._ring.end
