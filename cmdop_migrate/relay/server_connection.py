"""Define one connection of the relay: its send queue, bounded by its channels' windows, and when it was last alive."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from cmdop_migrate.clock import boottime
from cmdop_migrate.relay.credentials import Claims
from cmdop_migrate.relay.frames import Frame, encode

POLICY_VIOLATION = 1008
QUEUE_MOST = 4 << 20  # bytes queued for a client beyond which its frames are not read
GOODBYE_TIMEOUT = 2.0


class Connection:
    """Represent an admitted connection. `received_at`: when the last frame arrived. `progress_at`: when the peer last
    took queued bytes, or the queue was empty."""

    def __init__(self, number: int, socket: ServerConnection, address: str, claims: Claims, now: float) -> None:
        self.number, self.socket, self.address, self.claims = number, socket, address, claims
        self.received_at = self.progress_at = now
        self.queued = 0
        self.ended: str | None = None
        self._waiting: deque[bytes] = deque()
        self._wake = asyncio.Event()

    def put(self, frame: Frame) -> int:
        """Queue a frame, and return its size; 0 if the connection is ending."""
        if self.ended is not None:
            return 0
        data = encode(frame)
        self._waiting.append(data)
        self.queued += len(data)
        self._wake.set()
        return len(data)

    def end(self, code: str, last: Frame | None = None) -> None:
        """Drop the queue, send `last`, and end the connection; abort it if the peer does not take even that."""
        if self.ended is None:
            self._waiting.clear()
            self.queued = 0
            if last is not None:
                self.put(last)
            self.ended = code
            self._wake.set()
            asyncio.get_running_loop().call_later(GOODBYE_TIMEOUT, self.cut)

    def cut(self) -> None:
        """Abort the connection immediately: a closing handshake would wait for a peer that reads nothing."""
        self.socket.transport.abort()

    async def room(self) -> None:
        """Wait until the peer has taken enough of its queue. A client that does not read could otherwise ask for more
        and more."""
        while self.queued > QUEUE_MOST and self.ended is None:
            await asyncio.sleep(0.05)

    async def write(self) -> None:
        """Send queued frames until the connection ends."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                while self._waiting:
                    data = self._waiting.popleft()
                    await self.socket.send(data)
                    self.queued = max(0, self.queued - len(data))
                    self.progress_at = boottime()
                if self.ended is not None:
                    break
                self.progress_at = boottime()
                self._wake.clear()
                await self._wake.wait()
        self.ended = self.ended or "closed"
        self._waiting.clear()
        self.queued = 0
        await self.socket.close(POLICY_VIOLATION, self.ended[:100])

    def stuck(self, now: float, patience: float) -> bool:
        """Return whether the peer has taken nothing of its queue for `patience` seconds."""
        return self.queued > 0 and now - self.progress_at > patience
