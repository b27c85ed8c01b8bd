"""The relay: one asyncio server around the switchboard. Nothing it knows is needed by the next one."""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from cmdop_migrate import log
from cmdop_migrate.clock import boottime, walltime
from cmdop_migrate.errors import Unreachable, Usage
from cmdop_migrate.relay import admission
from cmdop_migrate.relay import http as relay_http
from cmdop_migrate.relay.admission import Refusal
from cmdop_migrate.relay.connection_limits import Door, origin_allowed
from cmdop_migrate.relay.frames import FRAME_MAX, Frame, FrameError, Kind, decode, encode, with_table
from cmdop_migrate.relay.lease_lookup import Truth
from cmdop_migrate.relay.log_budget import LogBudget
from cmdop_migrate.relay.router.router import Switchboard
from cmdop_migrate.relay.router.router_events import (
    Action,
    Answered,
    Ask,
    End,
    Event,
    Joined,
    Keep,
    Left,
    Limits,
    Note,
    NotKept,
    Received,
    Send,
    Ticked,
)
from cmdop_migrate.relay.server_connection import Connection
from cmdop_migrate.util.metrics import Metrics

TICK = 0.5
SILENT_BEATS = 3
TOO_BIG = 1009
GOODBYE = 3.0
_log = log.get("relay")


@dataclass(frozen=True)
class Serving:
    """How a relay serves. `queued`: bytes it keeps for all slow connections together. `recheck`: seconds between looks
    at the credentials of open connections. `patience`: seconds a dialer has to say who it is."""

    host: str
    port: int
    fleet: bytes
    tls: ssl.SSLContext | None
    origins: tuple[str, ...] = ()
    assets: Path | None = None
    connections: int = 10_000
    queued: int = 256 << 20
    recheck: float = 3.0
    patience: float = 5.0
    limits: Limits = field(default_factory=Limits)


class Relay:
    """`record` keeps what happened: (event, session, facts)."""

    def __init__(
        self, serving: Serving, truth: Truth, metrics: Metrics, record: Callable[[str, str, dict[str, Any]], None]
    ) -> None:
        self._serving, self._truth, self._metrics, self._record = serving, truth, metrics, record
        self._board = Switchboard(serving.limits)
        self._connections: dict[int, Connection] = {}
        self._numbers = 0
        self._door = Door(serving.connections)
        self._lines = LogBudget()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pages = relay_http.Pages({"/healthz": self._health, "/metrics": self._metrics_page}, serving.assets)

    async def run(self, stop: asyncio.Event, ready: Callable[[int], None]) -> None:
        """Serve until `stop`. `ready` hears the port."""
        serving = self._serving
        quiet = logging.getLogger(f"{log.LOGGER}.relay.websockets")
        quiet.setLevel(logging.CRITICAL)  # a traceback for each stranger who speaks something else
        more: dict[str, Any] = {"ssl_handshake_timeout": serving.patience} if serving.tls else {}
        listening = serve(
            self._handle,
            serving.host,
            serving.port,
            ssl=serving.tls,
            process_request=self._request,
            create_connection=self._door.connection_type(self._turned_away),
            compression=None,
            max_size=FRAME_MAX,
            max_queue=4,
            open_timeout=serving.patience,
            close_timeout=2,
            ping_interval=None,
            server_header=None,
            logger=quiet,
            **more,
        )
        try:
            server = await listening
        except OSError as error:
            where = f"{serving.host}:{serving.port}"
            raise Usage(f"cannot listen on {where}: {error.strerror}", "Give another with --listen.") from error
        async with server:
            ready(_port(server))
            self._start(self._tick_forever())
            self._start(self._recheck_forever())
            await stop.wait()
            server.close()
            try:
                await asyncio.wait_for(server.wait_closed(), GOODBYE)
            except TimeoutError:
                for one in self._connections.values():
                    one.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # HTTP

    def _request(self, socket: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("Upgrade", "").lower() != "websocket":
            return self._pages.answer(request)
        address = _address(socket)
        if not self._door.throttle.allows(address, boottime()):
            self._refused("throttled", "too many failures from this address", address)
            page = relay_http.text("too many failures\n", http.HTTPStatus.TOO_MANY_REQUESTS)
            return relay_http.response(page, Retry_After="5")
        if not origin_allowed(request.headers.get_all("Origin"), request.headers.get("Host"), self._serving.origins):
            self._failed("origin", "a page from elsewhere", address)
            return relay_http.response(relay_http.text("not from this origin\n", http.HTTPStatus.FORBIDDEN))
        return None

    def _health(self) -> relay_http.Page:
        since = self._truth.silent_since
        if since is None:
            return relay_http.text("ok\n")
        words = f"the lease store has not answered for {boottime() - since:.0f} s\n"
        return relay_http.text(words, http.HTTPStatus.SERVICE_UNAVAILABLE)

    def _metrics_page(self) -> relay_http.Page:
        board, metrics = self._board.bay, self._metrics
        metrics.set("hosts", len(board.hosts))
        metrics.set("clients", len(board.clients))
        metrics.set("connections", self._door.count)
        metrics.set("routes", sum(one.route is not None for one in board.entries.values()))
        metrics.set("channels", sum(len(one.channels) for one in board.hosts.values()))
        metrics.set("waiting", sum(len(one.waiting) for one in board.entries.values()))
        metrics.set("queued_bytes", sum(one.queued for one in self._connections.values()))
        return relay_http.text(metrics.text())

    # Connections

    async def _handle(self, socket: ServerConnection) -> None:
        address = _address(socket)
        try:
            async with asyncio.timeout(self._serving.patience):
                nonce, first = admission.challenge()
                await socket.send(encode(first))
                claims = admission.examine(self._serving.fleet, nonce, await socket.recv())
            await admission.listed(self._truth, claims)
        except Refusal as error:
            if error.code == "unavailable":
                self._refused(error.code, error.why, address, error.who)
            else:
                self._failed(error.code, error.why, address, error.who)
            await _say(socket, error.code, error.why)
            return
        except (TimeoutError, ConnectionClosed):
            self._failed("silent", "it did not say who it is", address)
            return
        self._door.admitted(socket)
        self._numbers += 1
        connection = Connection(self._numbers, socket, address, claims, boottime())
        try:
            await self._converse(connection)
        except Exception:
            _log.exception("the connection of %s broke down", claims.name)
            raise  # which ends this connection, and no other

    async def _converse(self, connection: Connection) -> None:
        number = connection.number
        self._connections[number] = connection
        self._metrics.add("admitted_total")
        writer = asyncio.create_task(connection.write())
        self._do(Joined(number, connection.claims))
        try:
            async for message in connection.socket:
                if connection.ended is not None:
                    break
                self._hear(connection, message)
                if connection.claims.kind == "client":
                    await connection.room()
        except ConnectionClosed as closed:
            if closed.sent is not None and closed.sent.code == TOO_BIG:
                self._refused("too_big", "a message that no frame can be", connection.address, connection.claims.name)
        finally:
            del self._connections[number]
            self._do(Left(number))
            connection.end("closed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(writer, 3)

    def _hear(self, connection: Connection, message: str | bytes) -> None:
        connection.heard = boottime()
        self._metrics.add("frames_total")
        self._metrics.add("bytes_total", len(message))
        try:
            if isinstance(message, str):
                raise FrameError("a text message")
            frame = decode(message)
        except FrameError as error:
            self._act(End(connection.number, "protocol", str(error)))
            return
        self._do(Received(connection.number, frame))

    # Actions

    def _do(self, event: Event) -> None:
        for action in self._board.handle(event, boottime()):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Send(conn, frame):
                connection = self._connections.get(conn)
                if connection is not None:
                    connection.put(frame)
            case End(conn, code, why):
                connection = self._connections.get(conn)
                if connection is not None and connection.ended is None:
                    self._refused(code, why, connection.address, connection.claims.name)
                    connection.end(code, _refusal(code, why))
            case Ask(session, named):
                self._start(self._ask(session, named))
            case Keep(session, name):
                self._start(self._keep(session, name))
            case Note(event, session, facts):
                if "code" in facts:
                    self._metrics.add("refused_total", label=str(facts["code"]))
                self._write(event, session, facts)

    async def _ask(self, session: str, named: bool) -> None:
        answer: Any = "silent"
        try:
            answer = await self._truth.standing(session, named)
        finally:
            self._do(Answered(session, answer))  # whatever happened: others wait for it

    async def _keep(self, session: str, name: str) -> None:
        if not await self._truth.keep_name(session, name):
            self._do(NotKept(session))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("unexpected", exc_info=task.exception())

    # What happens by itself

    async def _tick_forever(self) -> None:
        beat, beaten = self._serving.limits.beat, boottime()
        while True:
            await asyncio.sleep(TICK)
            try:
                now = boottime()
                self._do(Ticked())
                self._look_for_dead(now, beat * SILENT_BEATS)
                self._look_for_slow()
                if now - beaten >= beat:
                    beaten = now
                    for one in self._connections.values():
                        one.put(Frame(Kind.BEAT))
            except Exception:  # noqa: BLE001 - the next round may do better, and everyone here lives by it
                _log.exception("a round of the relay failed")

    def _look_for_dead(self, now: float, patience: float) -> None:
        for one in list(self._connections.values()):
            if one.ended is None and (now - one.heard > patience or one.stuck(now, patience)):
                self._act(End(one.number, "silent", f"no sign of life for {patience:g} s"))

    def _look_for_slow(self) -> None:
        """Windows bound what one connection can cost, this bounds all: the worst goes first."""
        while sum(one.queued for one in self._connections.values()) > self._serving.queued:
            worst = max(self._connections.values(), key=lambda one: one.queued)
            self._act(End(worst.number, "slow", "too much was waiting for it"))

    async def _recheck_forever(self) -> None:
        """Whoever was revoked, or whose time is over, is put out; with nobody here the store is asked all the same."""
        while True:
            await asyncio.sleep(self._serving.recheck)
            try:
                idents = {one.claims.id for one in self._connections.values()} or {"0" * 24}
                await asyncio.gather(*(self._recheck(ident) for ident in idents))
            except Exception:  # noqa: BLE001 - the next round may do better
                _log.exception("a look at the credentials failed")

    async def _recheck(self, ident: str) -> None:
        try:
            issue = await self._truth.issue(ident)
        except Unreachable:
            issue, why = None, ""  # not known: who is in stays in
        else:
            why = issue.why_not(walltime()) if issue is not None else "not listed any more"
        for one in list(self._connections.values()):
            if one.claims.id == ident:
                over = why or ("expired" if one.claims.is_over(walltime()) else "")
                if over:
                    self._act(End(one.number, "not_admitted", f"the credential is {over}"))

    # The record

    def _turned_away(self, address: str, code: str, why: str) -> None:
        self._refused(code, why, address)  # no failure to prove anything: whoever watches the port does this too

    def _failed(self, code: str, why: str, address: str, who: str = "") -> None:
        self._door.throttle.failed(address, boottime())
        self._refused(code, why, address, who)

    def _refused(self, code: str, why: str, address: str, who: str = "") -> None:
        self._metrics.add("refused_total", label=code)
        self._write(
            "relay_refused", "", {"code": code, "why": why, "address": address, **({"who": who} if who else {})}
        )

    def _write(self, event: str, session: str, facts: dict[str, Any]) -> None:
        """A flood of refusals must not fill the disk or hide others, nor a full disk end the relay."""
        passed_over = self._lines.take(f"{event} {facts['code']}", boottime()) if "code" in facts else 0
        if passed_over is None:
            return
        more = {"passed_over": passed_over} if passed_over else {}
        _log.info("%s %s %s", event, session, {**facts, **more})
        try:
            self._record(event, session, {**facts, **more})
        except OSError as error:
            _log.warning("cannot record %s: %s", event, error.strerror)


def _refusal(code: str, why: str) -> Frame:
    return with_table(Kind.REFUSED, {"code": code, "why": why[:200]})


async def _say(socket: ServerConnection, code: str, why: str) -> None:
    with contextlib.suppress(ConnectionClosed):
        await socket.send(encode(_refusal(code, why)))
        await socket.close(1008, code)


def _address(socket: ServerConnection) -> str:
    peer = socket.remote_address
    return str(peer[0]) if isinstance(peer, tuple) else "unknown"


def _port(server: Server) -> int:
    return int(next(iter(server.sockets)).getsockname()[1])
