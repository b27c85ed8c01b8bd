"""Connect this host to the relay, for all its sessions; to each relay, where several share one name.

The link is a process of its own, beside the agent. It dials out, registers the incarnations that run on this host, and
connects clients to holders. It keeps no state that matters: when it is killed, the agent starts it again, it finds the
sessions by their records, and clients resume where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from cmdop_migrate import clock, log
from cmdop_migrate.errors import CmdopError, NotAdmitted
from cmdop_migrate.gateway.channel_proxy import ChannelInfo, ChannelProxy, end
from cmdop_migrate.gateway.registration import Departure, SessionStatus, SessionWatcher, changes
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import Move
from cmdop_migrate.relay import credentials, e2e, frames
from cmdop_migrate.relay.backoff import Backoff
from cmdop_migrate.relay.client_connection import FIRST_TIMEOUT, OPEN_TIMEOUT, Connection, Lost, addresses, dial
from cmdop_migrate.relay.credentials import Claims, Credential
from cmdop_migrate.relay.frames import Frame, FrameError, Kind
from cmdop_migrate.util.inotify import Watch

RESOLVE_EVERY = 15.0  # relays may be added to the name, and removed
RELAYS_MOST = 8
SCAN_EVERY = 0.5  # in case inotify does not report a change
REGISTER_AGAIN = 1.0  # after a registration was refused
RECHECK_CLIENTS_EVERY = 3.0  # whether the credentials of connected clients are still valid
PHASES = 40  # of a move, that are sent to the relay; there are half as many
EXIT_NOTICE = 3.0  # for clients to receive the exit event of their session
InvalidBecause = Callable[[Claims], str]  # why a credential is invalid; empty if it is valid. May block, CmdopError
_log = log.get("link")


class Link:
    """Keep connections to all relays behind one name, and what they share."""

    def __init__(
        self,
        this_host: Host,
        url: str,
        credential: Callable[[], Credential],
        sign: e2e.Sign,
        invalid_because: InvalidBecause,
        on_status: Callable[[int, int], None] = lambda _connected, _relays: None,
    ) -> None:
        """Link the host to the relays at `url`. `credential` returns the current one; `sign` signs with the fleet's
        key. `on_status` is called with the number of relays it is connected to, and of those that exist, when
        they may have changed."""
        self._this_host, self._url, self._credential = this_host, url, credential
        self._on_status, self._connected, self._relays = on_status, 0, 0
        self._fleet = credential().fleet
        self._sign, self._invalid_because = sign, invalid_because
        self._watch = Watch()
        self._watcher = SessionWatcher(this_host, self._watch)
        self._waiting: set[asyncio.Event] = set()  # of every connection, set when a record changes
        self.reported: set[str] = set()  # ids of moves that were reported to a relay

    async def linger(self, seconds: float) -> None:
        """Wait until a move that is just ending has been reported, at most `seconds`. The agent may end with the last
        session, a little before the command that moved it has written down its figures."""
        end = clock.boottime() + seconds
        while clock.boottime() < end:
            self.scan()
            if not self._watcher.is_moving(self.reported):
                return
            await asyncio.sleep(0.1)

    async def run(self) -> None:
        """Keep a connection to each relay, until cancelled. Retry after NotAdmitted, too: a host that was revoked by
        mistake is admitted again."""
        asyncio.get_running_loop().add_reader(self._watch.fileno(), self._on_change)
        relays: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await self._connect_all(relays)
                await asyncio.sleep(RESOLVE_EVERY if relays else REGISTER_AGAIN)
        finally:
            await end(list(relays.values()))

    async def _connect_all(self, relays: dict[str, asyncio.Task[None]]) -> None:
        """Start a task for each relay behind the name: a client may be connected to any of them."""
        try:
            now = (await addresses(self._url))[:RELAYS_MOST]
        except CmdopError as error:
            _log.warning("%s", error)
            return
        for address in relays.keys() - set(now):
            await end([relays.pop(address)])
        for address in now:
            if address not in relays or relays[address].done():
                relays[address] = asyncio.create_task(self._keep(address), name=f"relay {address}")
        self._relays = len(relays)
        self._on_status(self._connected, self._relays)

    async def _keep(self, address: str) -> None:
        backoff = Backoff()
        while True:
            try:
                timeout = min(OPEN_TIMEOUT, FIRST_TIMEOUT * 2**backoff.failures)
                async with await dial(self._url, self._credential(), timeout, address) as connection:
                    backoff.worked()
                    _log.info("connected to %s at %s as %s", self._url, address, connection.welcome.name)
                    with self._counted():
                        await _Service(self, connection).run()
            except (CmdopError, Lost) as error:
                _log.warning("%s", error)
            await asyncio.sleep(backoff.failed())

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._connected += 1
        self._on_status(self._connected, self._relays)
        try:
            yield
        finally:
            self._connected -= 1
            self._on_status(self._connected, self._relays)

    def _on_change(self) -> None:
        self._watch.drain()
        self.wake()

    def wake(self) -> None:
        """Have every connection compare the sessions with what it has registered."""
        for event in self._waiting:
            event.set()

    def scan(self) -> dict[str, SessionStatus]:
        """Return this host's sessions as they are now."""
        return self._watcher.scan()

    def moved(self) -> list[Move]:
        """Return the last move of each session that left this host."""
        return self._watcher.moved()

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set whenever a session's record changes."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            yield event
        finally:
            self._waiting.discard(event)

    def seal(self, frame: Frame, claims: Claims, status: SessionStatus) -> e2e.HostSide:
        """Return the host's side of the encryption for a channel. Raise FrameError, ValueError or SealError."""
        handshake = credentials.unb64(frame.text("handshake"))
        bearer = credentials.unb64(claims.key)
        host = self._this_host.config.host
        return e2e.HostSide(status.session, status.token, host, self._sign, bearer, handshake)

    async def admit(self, frame: Frame, status: SessionStatus) -> Claims:
        """Return the claims of the client that sent an OPEN. Raise NotAdmitted if they are invalid, do not cover the
        session, or cannot be checked."""
        claims = credentials.verify_presented(self._fleet, frame.text("claims"), frame.text("signature"))
        if claims.kind != "client" or not claims.covers(status.session, status.name):
            raise NotAdmitted("the credential is not for this session", "")
        try:
            why = await self.invalid_because(claims)
        except CmdopError as error:
            raise NotAdmitted(f"the credential cannot be checked: {error.message}", "") from error
        if why:
            raise NotAdmitted(f"the credential is {why}", "")
        return claims

    async def invalid_because(self, claims: Claims) -> str:
        """Return why a credential is invalid; empty if it is valid. Raise CmdopError if the lease store does not
        answer."""
        if claims.is_over(clock.walltime()):
            return "expired"
        return await asyncio.to_thread(self._invalid_because, claims)

    def channel_info(self, frame: Frame, claims: Claims, status: SessionStatus) -> ChannelInfo:
        """Return what a proxy needs to know of the channel that an OPEN asks for."""
        socket = self._this_host.socket(status.session)
        return ChannelInfo(frame.channel, status.session, status.token, claims, socket)


class _Service:
    """Keep one connection to a relay: registrations out, client channels in."""

    def __init__(self, link: Link, connection: Connection) -> None:
        self._link, self._connection = link, connection
        self._seen: dict[str, SessionStatus] = {}
        self._registered: dict[str, int] = {}  # session -> fencing token
        self._refused: dict[str, float] = {}  # session -> when to register it again
        self._ending: dict[str, float] = {}  # session that ended -> until when its clients get the exit event
        self._moves: dict[str, Move] = {}  # as they were reported to the relay
        self._proxies: dict[int, ChannelProxy] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Serve until the connection is lost; raise Lost then."""
        work = (self._keep_registered(), self._recheck_clients(), self._receive())
        own = [asyncio.create_task(each) for each in work]
        try:
            done, _ = await asyncio.wait(own, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end([*own, *self._tasks.values()])

    async def _keep_registered(self) -> None:
        with self._link.listening() as changed:
            while True:
                await self._register_changes()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SCAN_EVERY):
                        await changed.wait()
                changed.clear()

    async def _register_changes(self) -> None:
        before, self._seen = self._seen, self._link.scan()
        now = clock.boottime()
        coming, leaving = changes(self._registered, self._seen)
        for departure in leaving:
            await self._leave(departure)
        for new in coming:
            if self._refused.get(new.session, 0.0) <= now:
                self._registered[new.session] = new.token
                facts = {"name": new.name, "state": "running"}
                register = frames.with_table(Kind.REGISTER, facts, new.session, new.token)
                await self._connection.send(register)
        for session, status in self._seen.items():
            if status.phase == "live" and status.to != (before[session].to if session in before else None):
                await self._tell_clients(status)
        await self._report_moves()

    async def _report_moves(self) -> None:
        """Send the figures of moves from this host, which only the source measures."""
        for move in self._link.moved():
            if self._moves.get(move.session) == move:
                continue
            self._moves[move.session] = move
            assert move.figures is not None
            facts = {name: move.figures[name] for name in ("frozen_s", "downtime_s")}
            phases = dict(list(move.figures["phases"].items())[:PHASES])
            facts |= {"to": move.target, "at": move.ended, "phases": phases}
            await self._connection.send(frames.with_table(Kind.MOVED, facts, move.session, move.figures["token"]))
            self._link.reported.add(move.id)

    async def _leave(self, departure: Departure) -> None:
        now, session = clock.boottime(), departure.session
        has_clients = departure.state != "moving" and bool(self._channels_of(session))
        if has_clients and now < self._ending.setdefault(session, now + EXIT_NOTICE):
            return  # its holder is sending them the exit event, which comes first; the next scan comes here again
        self._ending.pop(session, None)
        del self._registered[session]
        facts = {"state": departure.state, **({"to": departure.to} if departure.to else {})}
        await self._connection.send(frames.with_table(Kind.LEAVE, facts, session, departure.token))
        for number in self._channels_of(session):
            self._tasks[number].cancel()  # the relay has told its client

    def _channels_of(self, session: str) -> list[int]:
        return [number for number, proxy in self._proxies.items() if proxy.info.session == session]

    async def _tell_clients(self, status: SessionStatus) -> None:
        """Tell a session's clients that it is frozen to be moved, or that it stays."""
        event = {"event": "moving", "to": status.to} if status.to else {"event": "stays"}
        for number in self._channels_of(status.session):
            if number in self._proxies:
                await self._proxies[number].tell(event)

    async def _recheck_clients(self) -> None:
        """Close the channels of clients whose credential is no longer valid."""
        while True:
            await asyncio.sleep(RECHECK_CLIENTS_EVERY)
            for number, proxy in list(self._proxies.items()):
                try:
                    why = await self._link.invalid_because(proxy.info.claims)
                except CmdopError:
                    continue  # the lease store does not answer, and the credential was valid a moment ago
                if why:
                    await self._close(number, proxy.info.session, "not_admitted", f"the credential is {why}")
                    if number in self._tasks:
                        self._tasks[number].cancel()

    async def _receive(self) -> None:
        while True:
            frame = await self._connection.receive()
            try:
                self._received(frame)
            except FrameError as error:
                raise Lost(f"protocol error from the relay: {error}") from error

    def _received(self, frame: Frame) -> None:
        proxy = self._proxies.get(frame.channel)
        match frame.kind:
            case Kind.OPEN:
                self._open(frame)
            case Kind.DATA if proxy is not None:
                proxy.data(frame.payload)
            case Kind.CREDIT if proxy is not None:
                proxy.credit(frame.credit())
            case Kind.CLOSE if proxy is not None:
                self._tasks[frame.channel].cancel()
            case Kind.REFUSED if not frame.session:
                raise Lost(f"refused: {frame.text('why', '')}")
            case Kind.REFUSED:
                _log.warning("session %s: the relay refuses its registration: %s", frame.session, frame.text("why", ""))
                if self._registered.get(frame.session) == frame.token:
                    del self._registered[frame.session]
                    self._refused[frame.session] = clock.boottime() + REGISTER_AGAIN

    def _open(self, frame: Frame) -> None:
        task = asyncio.create_task(self._serve(frame), name=f"channel {frame.channel}")
        self._tasks[frame.channel] = task
        task.add_done_callback(lambda _: self._forget(frame.channel, task))

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(number) is task:
            del self._tasks[number]
            self._proxies.pop(number, None)
            self._link.wake()
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Lost):
            _log.error("a channel failed unexpectedly", exc_info=error)

    async def _serve(self, frame: Frame) -> None:
        status = self._seen.get(frame.session)
        if status is None or status.token != frame.token or status.phase != "live":
            await self._close(frame.channel, frame.session, "lost", "the session is no longer on this host")
            return
        try:
            claims = await self._link.admit(frame, status)
            info = self._link.channel_info(frame, claims, status)
            seal = self._link.seal(frame, claims, status)
            proxy = ChannelProxy(info, seal, self._connection.send, self._connection.welcome.window)
        except (NotAdmitted, FrameError, ValueError, e2e.SealError) as error:
            _log.warning("session %s: a client is refused: %s", status.name, error)
            await self._close(frame.channel, frame.session, "not_admitted", "the host does not admit this credential")
            return
        self._proxies[frame.channel] = proxy
        _log.info("%s (%s) joins %s", claims.name, claims.role, status.name)
        if status.to:
            await proxy.tell({"event": "moving", "to": status.to})
        await proxy.run()

    async def _close(self, number: int, session: str, code: str, why: str) -> None:
        await self._connection.send(frames.with_table(Kind.CLOSE, {"code": code, "why": why}, session, 0, number))
