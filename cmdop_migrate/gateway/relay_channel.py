"""Connect a stream to a session on the host where it runs, through a relay.

One connection to the relay serves both the listing and the session's sealed channel. When connection or channel
breaks, both are made again; gateway/resend.py decides what is then sent again. An event loop of its own does all of
this, and it runs only while the caller waits in `wait` or `close`: there is no thread. A caller that does not wait for
longer than the relay's silence limit loses the connection, and with it nothing: the next wait makes another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, Self

from cmdop_migrate import log
from cmdop_migrate.errors import CmdopError, NotAdmitted, SessionExited, SessionNotFound, Unexpected, Unreachable, Usage
from cmdop_migrate.gateway.channel_proxy import end
from cmdop_migrate.gateway.resend import Action, Ended, ResendBuffer, Retry, ToClient, ToHolder
from cmdop_migrate.holder import protocol
from cmdop_migrate.relay import e2e, frames
from cmdop_migrate.relay.backoff import Backoff
from cmdop_migrate.relay.client_connection import FIRST_TIMEOUT, OPEN_TIMEOUT, Connection, Lost, dial
from cmdop_migrate.relay.credentials import Credential, b64
from cmdop_migrate.relay.frames import Frame, FrameError, Kind
from cmdop_migrate.session.holder_client import Channel, HolderGone
from cmdop_migrate.session.stream import Item, Message, Ready, Stream, parse_frame

FLUSH_TIMEOUT = 1.0  # for typed bytes that are not on the wire yet when the stream is closed
CLOSE_TIMEOUT = 2.0
FIRST_CONTACT = 5.0  # seconds of retries for a relay that does not answer the first time
_FINAL = {"no_session", "exited", "not_admitted"}  # codes after which no other channel is tried
_log = log.get("relay_channel")


class RelayStream(Stream):
    """Represent a stream to one session. Use as a context manager, from one thread.

    Call `sessions` any number of times, then `open`. When the stream ends without an exit event, `failure` is the
    reason.
    """

    def __init__(self, url: str, credential: Credential, session: str | None = None) -> None:
        """Open `session`, if given. Nothing is sent before the first wait. Raise Usage inside a running event loop."""
        if _is_in_event_loop():
            raise Usage("a relay cannot be used inside a running event loop", "Use AsyncSession in a coroutine.")
        self._url, self._credential, self._session = url, credential, ""
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._buffer = ResendBuffer()
        self._connection: Connection | None = None
        self._sealed: _SealedChannel | None = None
        self._highest = 0  # fencing token
        self._last = 0  # number of a channel
        self._incoming: list[tuple[Item | None, _SealedChannel | None, int]] = []  # with the credit that they cost
        self._is_over = False
        self._reaching: asyncio.Task[None] | None = None
        self._crediting: set[asyncio.Task[None]] = set()
        self.failure: CmdopError | None = None
        self.channel = Channel(self)
        if session is not None:
            self.open(session)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def status(self) -> str | None:
        """Return why nothing arrives (moving, parked, waiting, away), or None if the session can be reached."""
        return str(self._buffer.status["event"]) if self._buffer.status else None

    def sessions(self) -> list[dict[str, Any]]:
        """Return the relay's list of sessions that the credential covers. Raise NotAdmitted or Unreachable."""
        return self._loop.run_until_complete(self._list())

    def open(self, session: str) -> Channel:
        """Begin to reach a session, by its id, and return the channel to it."""
        self._session = session
        self._reaching = self._loop.create_task(self._reach())
        self._reaching.add_done_callback(self._gave_up)
        return self.channel

    # Stream

    def send(self, message: Message) -> None:
        self._check_open()
        self._do(self._buffer.request(message))

    def type(self, data: bytes) -> None:
        self._loop.run_until_complete(self._wait_for_room())
        self._check_open()
        self._do(self._buffer.type(data))

    def has_room(self) -> bool:
        return self._buffer.has_room

    def receive(self) -> list[Item]:
        if not self._incoming:
            self._check_open()
        taken, self._incoming = self._incoming, []
        count = sum(cost for _, sealed, cost in taken if sealed is self._sealed)
        if count and self._sealed is not None:
            task = self._loop.create_task(self._give_credit(self._sealed, count))
            self._crediting.add(task)
            task.add_done_callback(self._crediting.discard)
        return [item for item, _, _ in taken if item is not None]

    def wait(self, timeout: float | None, readers: Sequence[int] = (), for_room: bool = False) -> Ready:
        return self._loop.run_until_complete(self._wait(timeout, readers, for_room))

    def close(self) -> None:
        if not self._loop.is_closed():
            try:
                self._loop.run_until_complete(self._shut_down())
            finally:
                self._loop.close()

    def _check_open(self) -> None:
        if self._is_ended():
            raise HolderGone

    async def _wait(self, timeout: float | None, readers: Sequence[int], for_room: bool) -> Ready:
        loop, readable = self._loop, set[int]()

        def is_readable(fd: int) -> None:
            readable.add(fd)
            self._changed.set()

        def is_done() -> bool:
            return bool(self._incoming or readable or self._is_ended() or (for_room and self._buffer.has_room))

        until = None if timeout is None else loop.time() + timeout
        for fd in readers:
            loop.add_reader(fd, is_readable, fd)
        try:
            # Two turns of the loop: the first asks the kernel, the second has run what the kernel reported.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            while not is_done():
                self._changed.clear()
                try:
                    async with asyncio.timeout_at(until):
                        await self._changed.wait()
                except TimeoutError:
                    break
        finally:
            for fd in readers:
                loop.remove_reader(fd)
        return Ready(bool(self._incoming) or self._is_ended(), self._buffer.has_room, frozenset(readable))

    async def _wait_for_room(self) -> None:
        while not self._buffer.has_room and not self._is_ended():
            self._changed.clear()
            await self._changed.wait()

    def _is_ended(self) -> bool:
        return self._is_over or self._reaching is None or self._reaching.done()

    async def _shut_down(self) -> None:
        sealed = self._sealed
        if sealed is not None and sealed.out and not self._is_ended():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_TIMEOUT):
                    await sealed.sent.wait()
        if self._reaching is not None:
            self._reaching.cancel()  # which says goodbye to the relay
            await asyncio.wait([self._reaching], timeout=CLOSE_TIMEOUT)
        await self._disconnect()
        others = asyncio.all_tasks() - {asyncio.current_task()}  # such as a wait that was interrupted
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _gave_up(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, CmdopError):
            self.failure = error
        elif isinstance(error, Exception):
            _log.error("the stream failed", exc_info=error)
            self.failure = Unexpected(f"{type(error).__name__}: {error}", "This is a bug; see the log with -vv.")
        self._changed.set()

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ToClient(item):
                    self._incoming.append((item, None, 0))
                case ToHolder(message):
                    if self._sealed is not None:
                        self._sealed.put(protocol.control(message))
                case Retry(seconds):
                    self._loop.call_later(seconds, lambda: self._do(self._buffer.retry()))
                case Ended():
                    self._is_over = True
        self._changed.set()

    # The relay

    async def _list(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        try:
            if self._connection is None:
                self._connection = await dial(self._url, self._credential)
            await self._connection.send(Frame(Kind.LIST))
            while True:
                frame = await self._connection.receive()
                if frame.kind is Kind.LISTING:
                    table = frame.table()
                    rows += table["sessions"]
                    if not table.get("more"):
                        return rows
        except (Lost, FrameError, KeyError, TypeError) as error:
            await self._disconnect()
            raise Unreachable(f"the relay at {self._url} did not answer: {error}", "Try again.") from error

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _reach(self) -> None:
        """Keep a connection and a channel, until cancelled. Raise CmdopError when no other attempt can succeed."""
        backoff = Backoff()
        give_up: float | None = time.monotonic() + FIRST_CONTACT
        while True:
            try:
                if self._connection is None:
                    timeout = min(OPEN_TIMEOUT, FIRST_TIMEOUT * 2**backoff.failures)
                    self._connection = await dial(self._url, self._credential, timeout)
                backoff.worked()
                give_up = None
                await self._serve(self._connection)
            except (Lost, Unreachable) as error:
                _log.info("%s", error)
                if give_up is not None and time.monotonic() > give_up:
                    raise
            finally:
                await self._disconnect()
            self._do(self._buffer.show_status({"event": "away"}))
            await asyncio.sleep(backoff.failed())

    async def _serve(self, connection: Connection) -> None:
        """Open one channel after the other on this connection. Raise Lost when the connection ends."""
        backoff = Backoff()
        while True:
            sender: asyncio.Task[None] | None = None
            sealed = self._new_channel(connection)
            opening = {"handshake": b64(sealed.seal.handshake), **self._credential.presented()}
            await connection.send(frames.with_table(Kind.OPEN, opening, self._session, 0, sealed.number))
            try:
                while True:
                    frame = await connection.receive()
                    if frame.channel not in (0, sealed.number):
                        continue  # of a channel that has ended
                    if frame.kind is Kind.DATA and not sealed.seal.is_open:
                        sender = await self._join(connection, sealed, frame)
                        backoff.worked()
                    elif frame.kind in (Kind.CLOSE, Kind.REFUSED):
                        self._closed(frame)
                        break
                    else:
                        self._received(sealed, frame)
            except FrameError as error:
                raise Lost(f"protocol error from the relay: {error}") from error
            finally:
                self._sealed = None
                self._buffer.closed()
                if sender is not None:
                    await end([sender])
            if sender is None:  # the channel was not joined: do not try again immediately
                await asyncio.sleep(backoff.failed())

    def _new_channel(self, connection: Connection) -> _SealedChannel:
        self._last += 1
        sign = self._credential.signer.sign
        seal = e2e.ClientSide(self._session, self._credential.fleet, sign, self._highest)
        return _SealedChannel(self._last, seal, connection.welcome.window)

    async def _join(self, connection: Connection, sealed: _SealedChannel, frame: Frame) -> asyncio.Task[None]:
        try:
            answer = sealed.seal.answer(frame.payload, frame.token)
        except e2e.SealError as error:
            raise _forged(error) from error
        self._highest = frame.token
        self._sealed = sealed
        sender = asyncio.create_task(self._send_sealed(connection, sealed))
        await self._send_data(connection, sealed, answer)
        await self._give_credit(sealed, len(frame.payload))
        self._do(self._buffer.opened(frame.token))
        return sender

    def _received(self, sealed: _SealedChannel, frame: Frame) -> None:
        match frame.kind:
            case Kind.DATA:
                try:
                    items = [parse_frame(*each) for each in sealed.decoder.feed(sealed.seal.open(frame.payload))]
                except e2e.SealError as error:
                    raise _forged(error) from error
                except protocol.ProtocolError as error:
                    raise Unexpected(f"protocol error from the host: {error}", "Is it of another version?") from error
                for item in items:
                    self._do(self._buffer.from_holder(item))
                self._incoming.append((None, sealed, len(frame.payload)))
                self._changed.set()
            case Kind.CREDIT:
                sealed.credit += frame.credit()
                sealed.wake.set()
            case Kind.STATUS:
                self._do(self._buffer.relay_status(frame.text("state"), frame.table().get("to")))

    def _closed(self, frame: Frame) -> None:
        """Return if another channel may succeed; raise CmdopError if not."""
        code, why = frame.text("code", ""), frame.text("why", "")
        _log.info("channel closed: %s: %s", code, why)
        if self._is_over or code not in _FINAL:
            return
        hint = "See: cmdop-migrate ls --relay"
        if code == "no_session":
            raise SessionNotFound(f"the relay knows no session {self._session[:12]} for this credential", hint)
        if code == "exited":
            raise SessionExited("the session has ended", hint)
        raise NotAdmitted(f"not admitted: {why}", "Ask for another credential: cmdop-migrate relay token create")

    async def _send_sealed(self, connection: Connection, sealed: _SealedChannel) -> None:
        """Send what is queued, as credit allows."""
        while True:
            while not sealed.out or sealed.credit <= e2e.OVERHEAD:
                sealed.wake.clear()
                await sealed.wake.wait()
            count = min(e2e.PIECE, sealed.credit - e2e.OVERHEAD, len(sealed.out))
            piece = bytes(sealed.out[:count])
            del sealed.out[:count]
            try:
                await self._send_data(connection, sealed, sealed.seal.seal(piece))
            except Lost:
                return  # the receiving task finds that out, too
            if not sealed.out:
                sealed.sent.set()

    async def _send_data(self, connection: Connection, sealed: _SealedChannel, payload: bytes) -> None:
        sealed.credit -= len(payload)
        seq, sealed.seq = sealed.seq, sealed.seq + 1
        await connection.send(Frame(Kind.DATA, self._session, sealed.seal.token, seq, sealed.number, payload))

    async def _give_credit(self, sealed: _SealedChannel, count: int) -> None:
        """Allow the host to send as much again as the caller has taken. Not for every few bytes."""
        sealed.owed += count
        if sealed.owed >= sealed.window // 4 and self._connection is not None:
            owed, sealed.owed = sealed.owed, 0
            with contextlib.suppress(Lost):
                await self._connection.send(frames.with_credit(sealed.number, owed, self._session))


class _SealedChannel:
    """Represent the state of one channel, while it lasts."""

    def __init__(self, number: int, seal: e2e.ClientSide, window: int) -> None:
        self.number, self.seal, self.window = number, seal, window
        self.decoder = protocol.Decoder()
        self.credit, self.owed, self.seq = window, 0, 0
        self.out = bytearray()
        self.wake, self.sent = asyncio.Event(), asyncio.Event()

    def put(self, data: bytes) -> None:
        """Queue bytes to be sent."""
        self.out += data
        self.sent.clear()
        self.wake.set()


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _forged(error: Exception) -> NotAdmitted:
    return NotAdmitted(
        f"what came over the relay is not from a host of this fleet: {error}",
        "Someone on the way, or the relay itself, has put something else in its place. Nothing more was sent.",
    )
