"""The link: this host's one connection to the relay, for all its sessions; to each, where several share its name. A
process of its own, beside the agent.

It dials out, says which incarnations live here, and joins clients to holders. It
knows nothing that matters: killed, it is started again, finds the sessions by
their records, and clients go on from where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from cmdop_migrate import clock, log
from cmdop_migrate.errors import CmdopError, NotAdmitted
from cmdop_migrate.gateway.channel_proxy import Passage, Way, end
from cmdop_migrate.gateway.registration import Leaving, Lookout, Standing, changes
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import Move
from cmdop_migrate.relay import credentials, e2e, frames
from cmdop_migrate.relay.backoff import Backoff
from cmdop_migrate.relay.client_connection import FIRST_TIMEOUT, OPEN_TIMEOUT, Connection, Lost, addresses, dial
from cmdop_migrate.relay.credentials import Claims, Credential
from cmdop_migrate.relay.frames import Frame, FrameError, Kind
from cmdop_migrate.util.inotify import Watch

RESOLVE_EVERY = 15.0  # relays may be added to the name, and taken out
RELAYS_MOST = 8
LOOK_EVERY = 0.5  # should the kernel not say that something changed
ASK_AGAIN = 1.0  # after a registration was refused
CHECK_EVERY = 3.0  # whether those who are connected still may be
PHASES = 40  # of a move, that the relay is told of; there are half as many
FAREWELL = 3.0  # for clients to hear how their session ended
Listed = Callable[[Claims], str]  # why a credential admits nobody, any more; empty when it does. May block
_log = log.get("link")


class Link:
    def __init__(
        self,
        this_host: Host,
        url: str,
        credential: Callable[[], Credential],
        sign: e2e.Sign,
        listed: Listed,
        standing: Callable[[int, int], None] = lambda _up, _of: None,
    ) -> None:
        """`credential`: as it is now. `sign`: with the fleet's key. `standing`: told whenever that changes, with how
        many relays it is connected, and how many there are."""
        self._this_host, self._url, self._credential = this_host, url, credential
        self._standing, self._up, self._of = standing, 0, 0
        self._fleet = credential().fleet
        self._sign, self._listed = sign, listed
        self._watch = Watch()
        self._lookout = Lookout(this_host, self._watch)
        self._waiting: set[asyncio.Event] = set()  # of every connection, set when something changes here
        self.told: set[str] = set()  # moves that the relay, or the one before it, was told of

    async def linger(self, seconds: float) -> None:
        """Until a move that is just ending was told of, at most so long: whoever moved the last session away from here
        measures a little longer than its agent has to do."""
        end = clock.boottime() + seconds
        while clock.boottime() < end:
            self.look()
            if not self._lookout.is_moving(self.told):
                return
            await asyncio.sleep(0.1)

    async def run(self) -> None:
        """For ever. NotAdmitted is waited out as well: who was revoked by mistake is admitted again."""
        asyncio.get_running_loop().add_reader(self._watch.fileno(), self._on_change)
        relays: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await self._meet(relays)
                await asyncio.sleep(RESOLVE_EVERY if relays else ASK_AGAIN)
        finally:
            await end(list(relays.values()))

    async def _meet(self, relays: dict[str, asyncio.Task[None]]) -> None:
        """A connection to each relay behind the name: a client may be at any of them."""
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
        self._of = len(relays)
        self._standing(self._up, self._of)

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
        self._up += 1
        self._standing(self._up, self._of)
        try:
            yield
        finally:
            self._up -= 1
            self._standing(self._up, self._of)

    def _on_change(self) -> None:
        self._watch.drain()
        self.wake()

    def wake(self) -> None:
        for one in self._waiting:
            one.set()

    def look(self) -> dict[str, Standing]:
        return self._lookout.look()

    def moved(self) -> list[Move]:
        return self._lookout.moved()

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever something changes here."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            yield event
        finally:
            self._waiting.discard(event)

    def seal(self, frame: Frame, claims: Claims, standing: Standing) -> e2e.HostSide:
        handshake = credentials.unb64(frame.text("handshake"))
        bearer = credentials.unb64(claims.key)
        host = self._this_host.config.host
        return e2e.HostSide(standing.session, standing.token, host, self._sign, bearer, handshake)

    async def admit(self, frame: Frame, standing: Standing) -> Claims:
        """Whose OPEN this is. NotAdmitted, also when nobody can say whether it is."""
        claims = credentials.verify_presented(self._fleet, frame.text("claims"), frame.text("signature"))
        if claims.kind != "client" or not claims.covers(standing.session, standing.name):
            raise NotAdmitted("the credential is not for this session", "")
        why = await self.why_not(claims)
        if why:
            raise NotAdmitted(f"the credential is {why}", "")
        return claims

    async def why_not(self, claims: Claims) -> str:
        if claims.is_over(clock.walltime()):
            return "expired"
        try:
            return await asyncio.to_thread(self._listed, claims)
        except CmdopError as error:
            return f"not to be looked up: {error.message}"

    def way(self, frame: Frame, claims: Claims, standing: Standing) -> Way:
        return Way(frame.channel, standing.session, standing.token, claims, self._this_host.socket(standing.session))


class _Service:
    """What is done over one connection, while it lasts."""

    def __init__(self, link: Link, connection: Connection) -> None:
        self._link, self._connection = link, connection
        self._seen: dict[str, Standing] = {}
        self._known: dict[str, int] = {}  # what the relay was told lives here
        self._refused: dict[str, float] = {}  # when to ask again
        self._parting: dict[str, float] = {}  # until when those that ended here have clients
        self._moves: dict[str, Move] = {}  # as the relay was told of them
        self._passages: dict[int, Passage] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until the connection is lost."""
        own = [asyncio.create_task(one) for one in (self._tell_relay(), self._check_clients(), self._hear())]
        try:
            done, _ = await asyncio.wait(own, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end([*own, *self._tasks.values()])

    async def _tell_relay(self) -> None:
        with self._link.listening() as changed:
            while True:
                await self._tell_once()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY):
                        await changed.wait()
                changed.clear()

    async def _tell_once(self) -> None:
        before, self._seen = self._seen, self._link.look()
        now = clock.boottime()
        coming, leaving = changes(self._known, self._seen)
        for one in leaving:
            await self._leave(one)
        for new in coming:
            if self._refused.get(new.session, 0.0) <= now:
                self._known[new.session] = new.token
                facts = {"name": new.name, "state": "running"}
                register = frames.with_table(Kind.REGISTER, facts, new.session, new.token)
                await self._connection.send(register)
        for session, standing in self._seen.items():
            if standing.phase == "live" and standing.to != (before[session].to if session in before else None):
                await self._tell_clients(standing)
        await self._tell_moves()

    async def _tell_moves(self) -> None:
        """How the moves from here went: only we have measured that."""
        for one in self._link.moved():
            if self._moves.get(one.session) == one:
                continue
            self._moves[one.session] = one
            assert one.figures is not None
            facts = {name: one.figures[name] for name in ("frozen_s", "downtime_s")}
            phases = dict(list(one.figures["phases"].items())[:PHASES])
            facts |= {"to": one.target, "at": one.ended, "phases": phases}
            await self._connection.send(frames.with_table(Kind.MOVED, facts, one.session, one.figures["token"]))
            self._link.told.add(one.id)

    async def _leave(self, one: Leaving) -> None:
        now = clock.boottime()
        has_clients = one.state != "moving" and bool(self._of(one.session))
        if has_clients and now < self._parting.setdefault(one.session, now + FAREWELL):
            return  # its holder is telling them how it ended: that comes first, and we will be here again
        self._parting.pop(one.session, None)
        del self._known[one.session]
        facts = {"state": one.state, **({"to": one.to} if one.to else {})}
        await self._connection.send(frames.with_table(Kind.LEAVE, facts, one.session, one.token))
        for number in self._of(one.session):
            self._tasks[number].cancel()  # the relay has told its client

    def _of(self, session: str) -> list[int]:
        return [number for number, one in self._passages.items() if one.way.session == session]

    async def _tell_clients(self, standing: Standing) -> None:
        """It stands still here, to be moved; or it does not any more."""
        event = {"event": "moving", "to": standing.to} if standing.to else {"event": "stays"}
        for number in self._of(standing.session):
            if number in self._passages:
                await self._passages[number].tell(event)

    async def _check_clients(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY)
            for number, passage in list(self._passages.items()):
                why = await self._link.why_not(passage.way.claims)
                if why and not why.startswith("not to be looked up"):  # the store is away: it was good a moment ago
                    await self._close(number, passage.way.session, "not_admitted", f"the credential is {why}")
                    if number in self._tasks:
                        self._tasks[number].cancel()

    async def _hear(self) -> None:
        while True:
            frame = await self._connection.receive()
            try:
                await self._heard(frame)
            except FrameError as error:
                raise Lost(f"the relay does not speak as it should: {error}") from error

    async def _heard(self, frame: Frame) -> None:
        passage = self._passages.get(frame.channel)
        match frame.kind:
            case Kind.OPEN:
                self._open(frame)
            case Kind.DATA if passage is not None:
                passage.data(frame.payload)
            case Kind.CREDIT if passage is not None:
                passage.credit(frame.credit())
            case Kind.CLOSE if passage is not None:
                self._tasks[frame.channel].cancel()
            case Kind.REFUSED if not frame.session:
                raise Lost(f"refused: {frame.text('why', '')}")
            case Kind.REFUSED:
                _log.warning("session %s: the relay refuses: %s", frame.session, frame.text("why", ""))
                if self._known.get(frame.session) == frame.token:
                    del self._known[frame.session]
                    self._refused[frame.session] = clock.boottime() + ASK_AGAIN

    def _open(self, frame: Frame) -> None:
        task = asyncio.create_task(self._serve(frame), name=f"channel {frame.channel}")
        self._tasks[frame.channel] = task
        task.add_done_callback(lambda _: self._forget(frame.channel, task))

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(number) is task:
            del self._tasks[number]
            self._passages.pop(number, None)
            self._link.wake()
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Lost):
            _log.error("a channel failed", exc_info=error)

    async def _serve(self, frame: Frame) -> None:
        standing = self._seen.get(frame.session)
        if standing is None or standing.token != frame.token or standing.phase != "live":
            await self._close(frame.channel, frame.session, "lost", "it is not here any more")
            return
        passage: Passage | None = None
        try:
            claims = await self._link.admit(frame, standing)
            way = self._link.way(frame, claims, standing)
            seal = self._link.seal(frame, claims, standing)
            passage = Passage(way, seal, self._connection.send, self._connection.welcome.window)
        except (NotAdmitted, FrameError, ValueError, e2e.SealError) as error:
            _log.warning("session %s: a client is refused: %s", standing.name, error)
            await self._close(frame.channel, frame.session, "not_admitted", "the host does not admit this credential")
            return
        self._passages[frame.channel] = passage
        _log.info("%s (%s) joins %s", claims.name, claims.role, standing.name)
        if standing.to:
            await passage.tell({"event": "moving", "to": standing.to})
        await passage.run()

    async def _close(self, number: int, session: str, code: str, why: str) -> None:
        await self._connection.send(frames.with_table(Kind.CLOSE, {"code": code, "why": why}, session, 0, number))
