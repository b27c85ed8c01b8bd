"""One connection of the relay: what waits to be sent on it, bounded by its channels' windows, and when it was alive."""

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
ROOM = 4 << 20
GRACE = 2.0


class Connection:
    """`heard`: when the last frame came. `moved`: when the last byte went, or there was none to go."""

    def __init__(self, number: int, socket: ServerConnection, address: str, claims: Claims, now: float) -> None:
        self.number, self.socket, self.address, self.claims = number, socket, address, claims
        self.heard = self.moved = now
        self.queued = 0
        self.ended: str | None = None
        self._waiting: deque[bytes] = deque()
        self._wake = asyncio.Event()

    def put(self, frame: Frame) -> int:
        """Its turn comes when the peer takes what is before it. How many bytes that is more."""
        if self.ended is not None:
            return 0
        data = encode(frame)
        self._waiting.append(data)
        self.queued += len(data)
        self._wake.set()
        return len(data)

    def end(self, code: str, last: Frame | None = None) -> None:
        """Say this, and no more: what was under way to it is dropped. Who does not take even that is cut off."""
        if self.ended is None:
            self._waiting.clear()
            self.queued = 0
            if last is not None:
                self.put(last)
            self.ended = code
            self._wake.set()
            asyncio.get_running_loop().call_later(GRACE, self.cut)

    def cut(self) -> None:
        """At once. A peer that takes nothing would keep every politer way waiting."""
        self.socket.transport.abort()

    async def room(self) -> None:
        """Whoever does not take what it asked for is not heard until it does: it could ask for more and more."""
        while self.queued > ROOM and self.ended is None:
            await asyncio.sleep(0.05)

    async def write(self) -> None:
        """Send until the connection is over."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                while self._waiting:
                    data = self._waiting.popleft()
                    await self.socket.send(data)
                    self.queued = max(0, self.queued - len(data))
                    self.moved = boottime()
                if self.ended is not None:
                    break
                self.moved = boottime()
                self._wake.clear()
                await self._wake.wait()
        self.ended = self.ended or "closed"
        self._waiting.clear()
        self.queued = 0
        await self.socket.close(POLICY_VIOLATION, self.ended[:100])

    def stuck(self, now: float, patience: float) -> bool:
        """It has what it does not take."""
        return self.queued > 0 and now - self.moved > patience
