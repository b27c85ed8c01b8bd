"""One client's channel on its host: from the relay, unsealed, past the doorkeeper, to the holder; and back.

Nothing is read from the holder that the client has not given credit for, so a
slow client costs nothing here: what it misses is dropped in the holder's ring.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmdop_migrate import log
from cmdop_migrate.gateway import permissions
from cmdop_migrate.holder import protocol
from cmdop_migrate.relay import e2e, frames
from cmdop_migrate.relay.credentials import Claims
from cmdop_migrate.relay.frames import Frame, Kind

HANDSHAKE_TIMEOUT = 10.0
LEAST = 1024  # bytes of credit worth a message
_log = log.get("link")
Send = Callable[[Frame], Awaitable[None]]


@dataclass(frozen=True)
class Way:
    """Whose channel it is, and to which incarnation."""

    number: int
    session: str
    token: int
    claims: Claims
    holder: Path


class Closed(Exception):
    """Why it is over, as CLOSE says it."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code, self.why = code, why


class Passage:
    def __init__(self, way: Way, seal: e2e.HostSide, send: Send, window: int) -> None:
        self.way = way
        self._seal, self._send_frame, self._window = seal, send, window
        self._came: asyncio.Queue[bytes] = asyncio.Queue()  # the relay lets no more than a window through
        self._credit, self._more = window, asyncio.Event()
        self._owed = 0
        self._seq = 0
        self._talking = asyncio.Lock()
        self._edges, self._at_edge = protocol.Edges(), False  # nothing is said before the handshake is over
        self._notices: list[bytes] = []
        self._sock = socket.socket(socket.AF_UNIX)

    def data(self, payload: bytes) -> None:
        self._came.put_nowait(payload)

    def credit(self, count: int) -> None:
        self._credit += count
        self._more.set()

    async def run(self) -> None:
        """Until either end is over; says why, unless it is the client that ended it (then this is cancelled)."""
        try:
            await self._join()
        except Closed as over:
            facts = {"code": over.code, "why": over.why}
            closing = frames.with_table(Kind.CLOSE, facts, self.way.session, self.way.token, self.way.number)
            await self._send_frame(closing)
        finally:
            self._sock.close()

    async def _join(self) -> None:
        await self._say(self._seal.first)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                first = await self._came.get()
                self._seal.accept(first)
                await self._connect()
        except e2e.SealError as error:
            raise Closed("not_admitted", str(error)) from error
        except TimeoutError as error:
            raise Closed("timed_out", "nobody answered") from error
        except OSError as error:
            raise Closed("lost", "the session's holder is not there") from error
        await self._took(len(first))
        async with self._talking:
            self._at_edge = True
            await self._put_in()
        tasks = [asyncio.create_task(self._inward()), asyncio.create_task(self._outward())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _connect(self) -> None:
        self._sock.setblocking(False)
        directory = os.open(self.way.holder.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = f"/proc/self/fd/{directory}/{self.way.holder.name}"
            await asyncio.get_running_loop().sock_connect(self._sock, path)
        finally:
            os.close(directory)

    async def _inward(self) -> None:
        """What the client says."""
        decoder = protocol.Decoder()
        loop = asyncio.get_running_loop()
        while True:
            payload = await self._came.get()
            try:
                found = decoder.feed(self._seal.open(payload))
                for kind, content in found:
                    passed = await self._judge(kind, content)
                    if passed:
                        await loop.sock_sendall(self._sock, passed)
            except e2e.SealError as error:
                raise Closed("not_admitted", str(error)) from error
            except protocol.ProtocolError as error:
                raise Closed("protocol", str(error)) from error
            except OSError as error:
                raise Closed("lost", "the session's holder is gone") from error
            await self._took(len(payload))

    async def _judge(self, kind: int, content: bytes) -> bytes:
        claims = self.way.claims
        if kind == protocol.INPUT and permissions.may_type(claims.role):
            return protocol.typed(content)
        message: dict[str, Any] = {"op": "type", "data": content}
        if kind == protocol.CONTROL:
            message = protocol.parse_control(content)
            passed = permissions.let_through(claims.role, claims.name, message)
            if passed is not None:
                return protocol.control(passed)
        _log.warning("%s (%s) may not %s", claims.name, claims.role, str(message.get("op"))[:40])
        await self.tell(permissions.refusal(message))
        return b""

    async def _outward(self) -> None:
        """What the holder says."""
        loop = asyncio.get_running_loop()
        while True:
            while self._credit < min(LEAST, self._window // 2) + e2e.OVERHEAD:
                self._more.clear()
                await self._more.wait()
            try:
                data = await loop.sock_recv(self._sock, min(e2e.PIECE, self._credit - e2e.OVERHEAD))
            except OSError:
                data = b""
            if not data:
                raise Closed("lost", "the session's holder has ended")
            async with self._talking:
                await self._say(self._seal.seal(data))
                self._at_edge = self._edges.feed(data)
                await self._put_in()

    async def tell(self, message: dict[str, Any]) -> None:
        """A word of our own, between what the holder says."""
        async with self._talking:
            self._notices.append(protocol.control(message))
            if self._at_edge:
                await self._put_in()

    async def _put_in(self) -> None:
        while self._at_edge and self._notices and self._credit > len(self._notices[0]) + e2e.OVERHEAD:
            await self._say(self._seal.seal(self._notices.pop(0)))

    async def _say(self, payload: bytes) -> None:
        self._credit -= len(payload)
        seq, self._seq = self._seq, self._seq + 1
        await self._send_frame(Frame(Kind.DATA, self.way.session, self.way.token, seq, self.way.number, payload))

    async def _took(self, count: int) -> None:
        """The client may send as much again. Not for every few bytes."""
        self._owed += count
        if self._owed >= self._window // 4:
            owed, self._owed = self._owed, 0
            await self._send_frame(frames.with_credit(self.way.number, owed, self.way.session, self.way.token))


async def end(tasks: list[asyncio.Task[None]]) -> None:
    """Ends them, and waits until they have."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
