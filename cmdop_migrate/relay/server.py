"""Serve the relay: asyncio I/O around the router. It keeps no state that the next relay process needs."""

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
from cmdop_migrate.relay.connection_limits import ConnectionLimiter, origin_allowed
from cmdop_migrate.relay.frames import FRAME_MAX, Frame, FrameError, Kind, decode, encode, with_table
from cmdop_migrate.relay.lease_lookup import LeaseLookup
from cmdop_migrate.relay.log_budget import LogBudget
from cmdop_migrate.relay.router.router import Router
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
TOO_BIG = 1009  # WebSocket close code
STOP_TIMEOUT = 3.0
_log = log.get("relay")


@dataclass(frozen=True)
class ServerOptions:
    """Configure a relay server. `queued`: bytes kept for all slow connections together. `recheck`: seconds between
    checks of the credentials of open connections. `patience`: seconds a peer has to present its credential."""

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
    """Represent one relay. `record` writes an event: (event, session, facts)."""

    def __init__(
        self,
        options: ServerOptions,
        lookup: LeaseLookup,
        metrics: Metrics,
        record: Callable[[str, str, dict[str, Any]], None],
    ) -> None:
        self._options, self._lookup, self._metrics, self._record = options, lookup, metrics, record
        self._router = Router(options.limits)
        self._connections: dict[int, Connection] = {}
        self._numbers = 0
        self._limiter = ConnectionLimiter(options.connections)
        self._log_budget = LogBudget()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pages = relay_http.Pages({"/healthz": self._health, "/metrics": self._metrics_page}, options.assets)

    async def run(self, stop: asyncio.Event, ready: Callable[[int], None]) -> None:
        """Serve until `stop`. Call `ready` with the port once the server listens. Raise Usage if it cannot."""
        options = self._options
        quiet = logging.getLogger(f"{log.LOGGER}.relay.websockets")
        quiet.setLevel(logging.CRITICAL)  # it would log a traceback for each peer that speaks another protocol
        more: dict[str, Any] = {"ssl_handshake_timeout": options.patience} if options.tls else {}
        listening = serve(
            self._handle,
            options.host,
            options.port,
            ssl=options.tls,
            process_request=self._request,
            create_connection=self._limiter.connection_type(self._refused_early),
            compression=None,
            max_size=FRAME_MAX,
            max_queue=4,
            open_timeout=options.patience,
            close_timeout=2,
            ping_interval=None,
            server_header=None,
            logger=quiet,
            **more,
        )
        try:
            server = await listening
        except OSError as error:
            where = f"{options.host}:{options.port}"
            raise Usage(f"cannot listen on {where}: {error.strerror}", "Give another with --listen.") from error
        async with server:
            ready(_port(server))
            self._start(self._tick_forever())
            self._start(self._recheck_forever())
            await stop.wait()
            server.close()
            try:
                await asyncio.wait_for(server.wait_closed(), STOP_TIMEOUT)
            except TimeoutError:
                for connection in self._connections.values():
                    connection.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # HTTP

    def _request(self, socket: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("Upgrade", "").lower() != "websocket":
            return self._pages.answer(request)
        address = _address(socket)
        if not self._limiter.throttle.allows(address, boottime()):
            self._refused("throttled", "too many failures from this address", address)
            page = relay_http.text("too many failures\n", http.HTTPStatus.TOO_MANY_REQUESTS)
            return relay_http.response(page, Retry_After="5")
        if not origin_allowed(request.headers.get_all("Origin"), request.headers.get("Host"), self._options.origins):
            self._failed("origin", "a page of another origin", address)
            return relay_http.response(relay_http.text("not from this origin\n", http.HTTPStatus.FORBIDDEN))
        return None

    def _health(self) -> relay_http.Page:
        since = self._lookup.silent_since
        if since is None:
            return relay_http.text("ok\n")
        message = f"the lease store has not answered for {boottime() - since:.0f} s\n"
        return relay_http.text(message, http.HTTPStatus.SERVICE_UNAVAILABLE)

    def _metrics_page(self) -> relay_http.Page:
        table, metrics = self._router.channels, self._metrics
        metrics.set("hosts", len(table.hosts))
        metrics.set("clients", len(table.clients))
        metrics.set("connections", self._limiter.count)
        metrics.set("routes", sum(entry.route is not None for entry in table.entries.values()))
        metrics.set("channels", sum(len(host.channels) for host in table.hosts.values()))
        metrics.set("waiting", sum(len(entry.waiting) for entry in table.entries.values()))
        metrics.set("queued_bytes", self._queued())
        return relay_http.text(metrics.text())

    # Connections

    async def _handle(self, socket: ServerConnection) -> None:
        address = _address(socket)
        try:
            async with asyncio.timeout(self._options.patience):
                nonce, first = admission.challenge()
                await socket.send(encode(first))
                claims = admission.examine(self._options.fleet, nonce, await socket.recv())
            await admission.check_listed(self._lookup, claims)
        except Refusal as error:
            if error.code == "unavailable":
                self._refused(error.code, error.why, address, error.who)
            else:
                self._failed(error.code, error.why, address, error.who)
            await _refuse(socket, error.code, error.why)
            return
        except (TimeoutError, ConnectionClosed):
            self._failed("silent", "the peer did not present a credential in time", address)
            return
        self._limiter.admitted(socket)
        self._numbers += 1
        connection = Connection(self._numbers, socket, address, claims, boottime())
        try:
            await self._serve(connection)
        except Exception:
            _log.exception("the connection of %s failed", claims.name)
            raise  # ends this connection only

    async def _serve(self, connection: Connection) -> None:
        number = connection.number
        self._connections[number] = connection
        self._metrics.add("admitted_total")
        writer = asyncio.create_task(connection.write())
        self._do(Joined(number, connection.claims))
        try:
            async for message in connection.socket:
                if connection.ended is not None:
                    break
                self._received(connection, message)
                if connection.claims.kind == "client":
                    await connection.room()
        except ConnectionClosed as closed:
            if closed.sent is not None and closed.sent.code == TOO_BIG:
                self._refused("too_big", "a message longer than any frame", connection.address, connection.claims.name)
        finally:
            del self._connections[number]
            self._do(Left(number))
            connection.end("closed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(writer, 3)

    def _received(self, connection: Connection, message: str | bytes) -> None:
        connection.received_at = boottime()
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
        for action in self._router.handle(event, boottime()):
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
            answer = await self._lookup.lease(session, named)
        finally:
            self._do(Answered(session, answer))  # also after an error: channels and registrations wait for it

    async def _keep(self, session: str, name: str) -> None:
        if not await self._lookup.keep_name(session, name):
            self._do(NotKept(session))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("unexpected", exc_info=task.exception())

    # Periodic work

    async def _tick_forever(self) -> None:
        beat, beaten = self._options.limits.beat, boottime()
        while True:
            await asyncio.sleep(TICK)
            try:
                now = boottime()
                self._do(Ticked())
                self._end_dead(now, beat * SILENT_BEATS)
                self._end_slow()
                if now - beaten >= beat:
                    beaten = now
                    for connection in self._connections.values():
                        connection.put(Frame(Kind.BEAT))
            except Exception:  # noqa: BLE001 - a supervising loop: the next round may succeed, and all depend on it
                _log.exception("a round of the relay failed")

    def _end_dead(self, now: float, patience: float) -> None:
        """End connections that are silent, or that take nothing of their queue."""
        for connection in list(self._connections.values()):
            is_silent = now - connection.received_at > patience
            if connection.ended is None and (is_silent or connection.stuck(now, patience)):
                self._act(End(connection.number, "silent", f"no sign of life for {patience:g} s"))

    def _end_slow(self) -> None:
        """End the connections with the longest queues while all queues together are too long. (Windows bound the queue
        of one connection.)"""
        while self._queued() > self._options.queued:
            worst = max(self._connections.values(), key=lambda connection: connection.queued)
            self._act(End(worst.number, "slow", "its queue was too long"))

    def _queued(self) -> int:
        return sum(connection.queued for connection in self._connections.values())

    async def _recheck_forever(self) -> None:
        """End connections whose credential was revoked or has expired. Without connections ask the store all the same,
        for `/healthz`."""
        while True:
            await asyncio.sleep(self._options.recheck)
            try:
                idents = {connection.claims.id for connection in self._connections.values()} or {"0" * 24}
                await asyncio.gather(*(self._recheck(ident) for ident in idents))
            except Exception:  # noqa: BLE001 - a supervising loop: the next round may succeed
                _log.exception("the check of credentials failed")

    async def _recheck(self, ident: str) -> None:
        try:
            issued = await self._lookup.credential(ident)
        except Unreachable:
            issued, why = None, ""  # unknown: admitted connections stay
        else:
            why = issued.invalid_because(walltime()) if issued is not None else "no longer listed"
        for connection in list(self._connections.values()):
            if connection.claims.id == ident:
                invalid = why or ("expired" if connection.claims.is_over(walltime()) else "")
                if invalid:
                    self._act(End(connection.number, "not_admitted", f"the credential is {invalid}"))

    # Events and log

    def _refused_early(self, address: str, code: str, why: str) -> None:
        self._refused(code, why, address)  # not counted as a failure to prove an identity: port monitors do this, too

    def _failed(self, code: str, why: str, address: str, who: str = "") -> None:
        self._limiter.throttle.failed(address, boottime())
        self._refused(code, why, address, who)

    def _refused(self, code: str, why: str, address: str, who: str = "") -> None:
        self._metrics.add("refused_total", label=code)
        self._write(
            "relay_refused", "", {"code": code, "why": why, "address": address, **({"who": who} if who else {})}
        )

    def _write(self, event: str, session: str, facts: dict[str, Any]) -> None:
        """Log an event and record it, within the budget for refusals: a flood of them must not fill the disk or hide
        others, and a full disk does not end the relay."""
        suppressed = self._log_budget.take(f"{event} {facts['code']}", boottime()) if "code" in facts else 0
        if suppressed is None:
            return
        more = {"passed_over": suppressed} if suppressed else {}
        _log.info("%s %s %s", event, session, {**facts, **more})
        try:
            self._record(event, session, {**facts, **more})
        except OSError as error:
            _log.warning("cannot record %s: %s", event, error.strerror)


def _refusal(code: str, why: str) -> Frame:
    return with_table(Kind.REFUSED, {"code": code, "why": why[:200]})


async def _refuse(socket: ServerConnection, code: str, why: str) -> None:
    with contextlib.suppress(ConnectionClosed):
        await socket.send(encode(_refusal(code, why)))
        await socket.close(1008, code)


def _address(socket: ServerConnection) -> str:
    peer = socket.remote_address
    return str(peer[0]) if isinstance(peer, tuple) else "unknown"


def _port(server: Server) -> int:
    return int(next(iter(server.sockets)).getsockname()[1])
