"""A session wherever it runs, as if its holder were here: one end of a socket pair that speaks as a holder does.

Behind it a thread keeps a connection to the relay and a sealed channel to the
session, and makes both anew when they break: gateway/resend.py says what is then
sent again. `Channel`, `terminal.attach` and the rest work over it unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any, Self

from cmdop_migrate import log
from cmdop_migrate.errors import (
    CmdopError,
    NotAdmitted,
    SessionExited,
    SessionNotFound,
    Unexpected,
    Unreachable,
)
from cmdop_migrate.gateway.channel_proxy import end
from cmdop_migrate.gateway.resend import Act, Again, Bridge, Over, ToClient, ToHolder
from cmdop_migrate.holder import protocol
from cmdop_migrate.relay import e2e, frames
from cmdop_migrate.relay.backoff import Backoff
from cmdop_migrate.relay.client_connection import FIRST_TIMEOUT, OPEN_TIMEOUT, Connection, Lost, dial
from cmdop_migrate.relay.credentials import Credential, b64
from cmdop_migrate.relay.frames import Frame, FrameError, Kind
from cmdop_migrate.session.holder_client import Channel

READ = 64 << 10
FLUSH = 1.0
PATIENCE = 5.0  # for a relay that does not answer the first time
_ENDS = {"no_session", "exited", "not_admitted"}  # codes after which there is nothing to try again
_log = log.get("line")


class Line:
    """One session, by its id. Use as a context manager; `channel` is what to talk over. When that ends without a
    farewell, `why` says why."""

    def __init__(self, url: str, credential: Credential, session: str) -> None:
        self._url, self._credential, self._session = url, credential, session
        ours, self._theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.why: CmdopError | None = None
        self.bridge = Bridge()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="line", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()  # the thread sees that, says goodbye and ends
        self._thread.join(2.0)
        if self._thread.is_alive() and self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(2.0)

    def settle(self) -> None:
        """Waits for the last word, after the channel has ended."""
        self._thread.join(2.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except CmdopError as error:
            self.why = error
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 - a supervising thread: whoever waits for us must hear of it
            _log.error("the line failed", exc_info=True)
            self.why = Unexpected(f"{type(error).__name__}: {error}", "This is a bug; see the log with -vv.")
        finally:
            self._started.set()
            self._theirs.close()

    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._started.set()
        self._theirs.setblocking(False)
        await _Talk(self._url, self._credential, self._session, self._theirs, self.bridge).run()


class _Pipe:
    """One channel, while it lasts."""

    def __init__(self, number: int, seal: e2e.ClientSide, window: int) -> None:
        self.number, self.seal, self.window = number, seal, window
        self.decoder = protocol.Decoder()
        self.credit, self.owed, self.seq = window, 0, 0
        self.out = bytearray()
        self.wake = asyncio.Event()


class _Talk:
    def __init__(self, url: str, credential: Credential, session: str, local: socket.socket, bridge: Bridge) -> None:
        self._url, self._credential, self._session = url, credential, session
        self._local, self._bridge = local, bridge
        self._connection: Connection | None = None
        self._pipe: _Pipe | None = None
        self._highest = 0
        self._last = 0
        self._shown: asyncio.Queue[tuple[bytes, _Pipe | None, int]] = asyncio.Queue()
        self._room = asyncio.Event()
        self._over = False
        self._later: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the client leaves or the session ends. CmdopError when neither happened, and there is no way on."""
        tasks = [asyncio.create_task(one) for one in (self._from_client(), self._to_client(), self._reach())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[2] in done:  # what has come goes to the client before it hears that no more will
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._shown.join(), FLUSH)
            for task in done:
                task.result()
        finally:
            await end([*tasks, *self._later])

    # The client

    async def _from_client(self) -> None:
        loop, decoder = asyncio.get_running_loop(), protocol.Decoder()
        while True:
            while not self._bridge.has_room:
                self._room.clear()
                await self._room.wait()
            try:
                data = await loop.sock_recv(self._local, READ)
            except OSError:
                return
            if not data:
                return
            for kind, payload in decoder.feed(data):
                self._do(self._bridge.from_client(kind, payload))

    async def _to_client(self) -> None:
        """At its pace. What it has taken, the session may send again."""
        loop = asyncio.get_running_loop()
        while True:
            shown = [await self._shown.get()]
            while not self._shown.empty():
                shown.append(self._shown.get_nowait())
            try:
                await loop.sock_sendall(self._local, b"".join(data for data, _, _ in shown))
            except OSError:
                return
            count = sum(count for _, pipe, count in shown if pipe is not None and pipe is self._pipe)
            if count and self._pipe is not None:
                await self._took(self._pipe, count)
            for _ in shown:
                self._shown.task_done()
            if self._over and self._shown.empty():
                return

    async def _took(self, pipe: _Pipe, count: int) -> None:
        pipe.owed += count
        if pipe.owed >= pipe.window // 4 and self._connection is not None:
            owed, pipe.owed = pipe.owed, 0
            with contextlib.suppress(Lost):
                await self._connection.send(frames.with_credit(pipe.number, owed, self._session))

    def _do(self, acts: list[Act]) -> None:
        for act in acts:
            match act:
                case ToClient(data):
                    self._shown.put_nowait((data, None, 0))
                case ToHolder(data):
                    if self._pipe is not None:
                        self._pipe.out += data
                        self._pipe.wake.set()
                case Again(seconds):
                    task = asyncio.create_task(self._again(seconds))
                    self._later.add(task)
                    task.add_done_callback(self._later.discard)
                case Over():
                    self._over = True
        if self._bridge.has_room:
            self._room.set()

    async def _again(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._do(self._bridge.again())

    # The relay

    async def _reach(self) -> None:
        backoff, loop = Backoff(), asyncio.get_running_loop()
        give_up: float | None = loop.time() + PATIENCE
        while True:
            try:
                timeout = min(OPEN_TIMEOUT, FIRST_TIMEOUT * 2**backoff.failures)
                async with await dial(self._url, self._credential, timeout) as self._connection:
                    backoff.worked()
                    give_up = None
                    await self._talk(self._connection)
            except (Lost, Unreachable) as error:
                _log.info("%s", error)
                if give_up is not None and loop.time() > give_up:
                    raise
            finally:
                self._connection = None
            self._do(self._bridge.whereabouts({"event": "away"}))
            await asyncio.sleep(backoff.failed())

    async def _talk(self, connection: Connection) -> None:
        """Channel after channel."""
        backoff = Backoff()
        while True:
            sender: asyncio.Task[None] | None = None
            pipe = self._new_pipe(connection)
            opening = {"handshake": b64(pipe.seal.handshake), **self._credential.presented()}
            await connection.send(frames.with_table(Kind.OPEN, opening, self._session, 0, pipe.number))
            try:
                while True:
                    frame = await connection.receive()
                    if frame.channel not in (0, pipe.number):
                        continue  # of one that is over
                    if frame.kind is Kind.DATA and not pipe.seal.is_open:
                        sender = await self._join(connection, pipe, frame)
                        backoff.worked()
                    elif frame.kind in (Kind.CLOSE, Kind.REFUSED):
                        self._closed(frame)
                        break
                    else:
                        self._hear(pipe, frame)
            except FrameError as error:
                raise Lost(f"the relay does not speak as it should: {error}") from error
            finally:
                self._pipe = None
                self._bridge.closed()
                if sender is not None:
                    await end([sender])
            if sender is None:  # it got nowhere: not at once again
                await asyncio.sleep(backoff.failed())

    def _new_pipe(self, connection: Connection) -> _Pipe:
        self._last += 1
        sign = self._credential.signer.sign
        seal = e2e.ClientSide(self._session, self._credential.fleet, sign, self._highest)
        return _Pipe(self._last, seal, connection.welcome.window)

    async def _join(self, connection: Connection, pipe: _Pipe, frame: Frame) -> asyncio.Task[None]:
        try:
            answer = pipe.seal.answer(frame.payload, frame.token)
        except e2e.SealError as error:
            raise _forged(error) from error
        self._highest = frame.token
        self._pipe = pipe
        sender = asyncio.create_task(self._sender(connection, pipe))
        await self._send(connection, pipe, answer)
        await self._took(pipe, len(frame.payload))
        self._do(self._bridge.opened(frame.token))
        return sender

    def _hear(self, pipe: _Pipe, frame: Frame) -> None:
        match frame.kind:
            case Kind.DATA:
                try:
                    heard = pipe.decoder.feed(pipe.seal.open(frame.payload))
                except e2e.SealError as error:
                    raise _forged(error) from error
                except protocol.ProtocolError as error:
                    raise Unexpected(f"the host speaks otherwise: {error}", "Is it of another version?") from error
                for kind, payload in heard:
                    self._do(self._bridge.from_holder(kind, payload))
                self._shown.put_nowait((b"", pipe, len(frame.payload)))
            case Kind.CREDIT:
                pipe.credit += frame.credit()
                pipe.wake.set()
            case Kind.STATUS:
                self._do(self._bridge.whereabouts_of(frame.text("state"), frame.table().get("to")))

    def _closed(self, frame: Frame) -> None:
        """Returns when another channel is to be tried."""
        code, why = frame.text("code", ""), frame.text("why", "")
        _log.info("channel closed: %s: %s", code, why)
        if self._over or code not in _ENDS:
            return
        hint = "See: cmdop-migrate ls --relay"
        if code == "no_session":
            raise SessionNotFound(f"the relay knows no session {self._session[:12]} for this credential", hint)
        if code == "exited":
            raise SessionExited("the session has ended", hint)
        raise NotAdmitted(f"not admitted: {why}", "Ask for another credential: cmdop-migrate relay token create")

    async def _sender(self, connection: Connection, pipe: _Pipe) -> None:
        while True:
            while not pipe.out or pipe.credit <= e2e.OVERHEAD:
                pipe.wake.clear()
                await pipe.wake.wait()
            count = min(e2e.PIECE, pipe.credit - e2e.OVERHEAD, len(pipe.out))
            piece = bytes(pipe.out[:count])
            del pipe.out[:count]
            try:
                await self._send(connection, pipe, pipe.seal.seal(piece))
            except Lost:
                return  # whoever receives finds that out, too

    async def _send(self, connection: Connection, pipe: _Pipe, payload: bytes) -> None:
        pipe.credit -= len(payload)
        seq, pipe.seq = pipe.seq, pipe.seq + 1
        await connection.send(Frame(Kind.DATA, self._session, pipe.seal.token, seq, pipe.number, payload))


def _forged(error: Exception) -> NotAdmitted:
    return NotAdmitted(
        f"what came over the relay is not from a host of this fleet: {error}",
        "Someone on the way, or the relay itself, has put something else in its place. Nothing more was sent.",
    )


async def listing(url: str, credential: Credential) -> list[dict[str, Any]]:
    """The sessions that the relay has for this credential."""
    found: list[dict[str, Any]] = []
    try:
        async with await dial(url, credential) as connection:
            await connection.send(Frame(Kind.LIST))
            while True:
                frame = await connection.receive()
                if frame.kind is Kind.LISTING:
                    table = frame.table()
                    found += table["sessions"]
                    if not table.get("more"):
                        return found
    except (Lost, FrameError, KeyError, TypeError) as error:
        raise Unreachable(f"the relay at {url} did not answer: {error}", "Try again.") from error
