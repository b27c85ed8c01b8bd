"""Carry one client's channel on the session's host: frames from the relay are decrypted, checked against the client's
role and passed to the holder, and the holder's frames go back encrypted.

Nothing is read from the holder that the client has not given credit for, so a
slow client costs nothing here: output it misses is dropped in the holder's ring.
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
LEAST_CREDIT = 1024  # bytes that are worth a message
_log = log.get("link")
Send = Callable[[Frame], Awaitable[None]]


@dataclass(frozen=True)
class ChannelInfo:
    """Represent the number of a channel, its bearer, and the incarnation it leads to."""

    number: int
    session: str
    token: int
    claims: Claims
    holder: Path


class ChannelClosed(Exception):
    """Report that the channel has ended on the host's side; `code` and `why` go into the CLOSE frame."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code, self.why = code, why


class ChannelProxy:
    """Proxy one client's channel, from the relay to the holder's socket and back."""

    def __init__(self, info: ChannelInfo, seal: e2e.HostSide, send: Send, window: int) -> None:
        self.info = info
        self._seal, self._send_frame, self._window = seal, send, window
        self._received: asyncio.Queue[bytes] = asyncio.Queue()  # bounded: the relay passes no more than a window
        self._credit, self._more = window, asyncio.Event()
        self._owed = 0
        self._seq = 0
        self._sending = asyncio.Lock()
        self._edges, self._at_edge = protocol.Edges(), False  # nothing is sent before the handshake is complete
        self._notices: list[bytes] = []
        self._sock = socket.socket(socket.AF_UNIX)

    def data(self, payload: bytes) -> None:
        """Take the payload of a DATA frame from the client."""
        self._received.put_nowait(payload)

    def credit(self, count: int) -> None:
        """Take credit from the client: `count` more bytes may be sent to it."""
        self._credit += count
        self._more.set()

    async def run(self) -> None:
        """Carry frames until the holder's side ends, and send CLOSE with the reason. Cancelled when the client ends."""
        try:
            await self._join()
        except ChannelClosed as closed:
            facts = {"code": closed.code, "why": closed.why}
            info = self.info
            await self._send_frame(frames.with_table(Kind.CLOSE, facts, info.session, info.token, info.number))
        finally:
            self._sock.close()

    async def _join(self) -> None:
        await self._send_data(self._seal.first)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                first = await self._received.get()
                self._seal.accept(first)
                await self._connect()
        except e2e.SealError as error:
            raise ChannelClosed("not_admitted", str(error)) from error
        except TimeoutError as error:
            raise ChannelClosed("timed_out", "the client did not answer the handshake") from error
        except OSError as error:
            raise ChannelClosed("lost", "the session's holder does not listen") from error
        await self._give_credit(len(first))
        async with self._sending:
            self._at_edge = True
            await self._send_notices()
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
        directory = os.open(self.info.holder.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = f"/proc/self/fd/{directory}/{self.info.holder.name}"
            await asyncio.get_running_loop().sock_connect(self._sock, path)
        finally:
            os.close(directory)

    async def _inward(self) -> None:
        """Pass the client's frames on to the holder."""
        decoder = protocol.Decoder()
        loop = asyncio.get_running_loop()
        while True:
            payload = await self._received.get()
            try:
                for kind, content in decoder.feed(self._seal.open(payload)):
                    passed = await self._filter(kind, content)
                    if passed:
                        await loop.sock_sendall(self._sock, passed)
            except e2e.SealError as error:
                raise ChannelClosed("not_admitted", str(error)) from error
            except protocol.ProtocolError as error:
                raise ChannelClosed("protocol", str(error)) from error
            except OSError as error:
                raise ChannelClosed("lost", "the session's holder is gone") from error
            await self._give_credit(len(payload))

    async def _filter(self, kind: int, content: bytes) -> bytes:
        """Return the frame that the holder is to get; empty if the client's role does not allow it."""
        claims = self.info.claims
        if kind == protocol.INPUT and permissions.may_type(claims.role):
            return protocol.typed(content)
        message: dict[str, Any] = {"op": "type", "data": content}
        if kind == protocol.CONTROL:
            message = protocol.parse_control(content)
            passed = permissions.allowed_request(claims.role, claims.name, message)
            if passed is not None:
                return protocol.control(passed)
        _log.warning("%s (%s) may not %s", claims.name, claims.role, str(message.get("op"))[:40])
        await self.tell(permissions.refusal(message))
        return b""

    async def _outward(self) -> None:
        """Pass the holder's bytes on to the client, as credit allows."""
        loop = asyncio.get_running_loop()
        while True:
            while self._credit < min(LEAST_CREDIT, self._window // 2) + e2e.OVERHEAD:
                self._more.clear()
                await self._more.wait()
            try:
                data = await loop.sock_recv(self._sock, min(e2e.PIECE, self._credit - e2e.OVERHEAD))
            except OSError:
                data = b""
            if not data:
                raise ChannelClosed("lost", "the session's holder has ended")
            async with self._sending:
                await self._send_data(self._seal.seal(data))
                self._at_edge = self._edges.feed(data)
                await self._send_notices()

    async def tell(self, message: dict[str, Any]) -> None:
        """Send a message of the host's own, between two frames of the holder."""
        async with self._sending:
            self._notices.append(protocol.control(message))
            if self._at_edge:
                await self._send_notices()

    async def _send_notices(self) -> None:
        while self._at_edge and self._notices and self._credit > len(self._notices[0]) + e2e.OVERHEAD:
            await self._send_data(self._seal.seal(self._notices.pop(0)))

    async def _send_data(self, payload: bytes) -> None:
        self._credit -= len(payload)
        seq, self._seq = self._seq, self._seq + 1
        await self._send_frame(Frame(Kind.DATA, self.info.session, self.info.token, seq, self.info.number, payload))

    async def _give_credit(self, count: int) -> None:
        """Allow the client to send as much again. Not for every few bytes."""
        self._owed += count
        if self._owed >= self._window // 4:
            owed, self._owed = self._owed, 0
            await self._send_frame(frames.with_credit(self.info.number, owed, self.info.session, self.info.token))


async def end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
