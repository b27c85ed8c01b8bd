"""The agent: one process a host. Renews the leases of all its sessions, and hands each holder its time.

It may die at any moment and be started again: sessions do not notice until
their time runs out, and then stand still until it is back. What it finds out
about a session that is no longer ours it acts on itself, whether or not the
holder answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from cmdop_migrate import clock, log
from cmdop_migrate.agent import supervisor
from cmdop_migrate.agent.deadline_watchdog import StandIn, is_still
from cmdop_migrate.agent.holder_connections import Lines
from cmdop_migrate.agent.metrics import agent_metrics
from cmdop_migrate.agent.move_recovery import Handovers
from cmdop_migrate.agent.pause_watchdog import Vigil
from cmdop_migrate.errors import Blocked, CmdopError, Fenced, LeaseUnreachable, Unreachable
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import hooks, reconcile
from cmdop_migrate.host import leases as host_leases
from cmdop_migrate.host.agent_process import Lock
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.name_lease import HostName
from cmdop_migrate.lease import margins
from cmdop_migrate.lease.rules import Lost, Why
from cmdop_migrate.lease.store import Held, LeaseStore
from cmdop_migrate.migration import ownership, prefetch_directory
from cmdop_migrate.model import Record

IDLE_ROUNDS = 2
LOOK_EVERY = 0.2
HOOKS_AT_ONCE = 4
LAST_WORD = 0.3  # what a holder gets to note why, before its session is killed for it
_log = log.get("agent")
Answer = Held | Lost | CmdopError


class Agent:
    def __init__(self, this_host: Host, leases: LeaseStore, lock: Lock, until_idle: bool) -> None:
        self.this_host, self.leases, self.config, self.lock = this_host, leases, this_host.config, lock
        self.until_idle = until_idle
        self.stopped = threading.Event()
        self.held: dict[str, Held] = {}
        self.known: dict[str, Record] = {}
        self.ending: dict[str, Held] = {}
        self.met: set[tuple[str, int]] | None = None  # sessions and tokens: alive once, or seen to be over
        self.unsure: set[str] = set()
        self.parking: set[str] = set()
        self.silent: set[str] = set()
        self.told: dict[str, int] = {}  # whose fencing hooks have heard of
        self.lines = Lines(this_host.socket)
        self.metrics = agent_metrics(self.config.run_dir)
        self.name = HostName(leases, this_host)
        self.hooks = ThreadPoolExecutor(HOOKS_AT_ONCE, "hooks")  # nothing waits for them but the end of this process
        self.handovers = Handovers(this_host, leases, self._tell_back)
        self.parkings = reconcile.Parkings(this_host, leases)
        self.vigil = Vigil(this_host.socket, lambda: list(self.known))
        self.stand_in = StandIn(this_host, lambda: self.known, self.held)

    def run(self) -> None:
        """Until told to stop, or, started on demand, until there is nothing to do."""
        idle, due = 0, clock.boottime()
        while not self.stopped.is_set():
            seen = self._stamp()
            renew = clock.boottime() >= due or self.vigil.found
            if renew:
                self.vigil.renewing()
                due = clock.boottime() + margins.renew_every(self.config.lease_ttl)
            try:
                busy = self.step(renew)
                idle = 0 if busy else idle + 1
                if self.until_idle and idle >= IDLE_ROUNDS and self._may_leave():
                    return
            except Exception:  # noqa: BLE001 - a supervising loop: what fails in one round may work in the next
                _log.error("a round failed", exc_info=True)
                self.metrics.add("round_failures_total")
                busy, due = True, min(due, clock.boottime() + 1.0)
            self._sleep(due, seen if busy else None)

    def _sleep(self, due: float, seen: object) -> None:
        """Until `due`, or until a session has come, gone or changed since `seen`."""
        while clock.boottime() < due:
            if self.stopped.wait(min(LOOK_EVERY, max(0.0, due - clock.boottime()))):
                return
            if seen is None or self.vigil.found or self._stamp() != seen:
                return

    def _stamp(self) -> object:
        found = []
        for session in sorted(self.this_host.ids()):
            try:
                found.append((session, os.stat(self.this_host.directory(session) / "session.json").st_mtime_ns))
            except OSError:
                found.append((session, 0))
        return found

    def _may_leave(self) -> bool:
        """Nobody is starting or restoring a session right now who counts on us."""
        with self.this_host.locked():
            if prefetch_directory.sweep(self.config.state_dir) or any(
                map(self.this_host.is_held, self.this_host.ids())
            ):
                return False
            self.name.let_go()
            self.metrics.remove()
            self.lock.release()
            return True

    def step(self, renew: bool = True) -> bool:
        """One round: what came is taken on, what ended is let go of, and, to `renew`, every lease is renewed and every
        holder told. -> whether there is anything to do."""
        live = self.look()
        self._settle(live)
        heard = self._resume([record for record in live.values() if record.session not in self.held])
        if renew:
            known = [lease for lease in self.held.values() if lease.session not in heard]
            began = time.monotonic()
            answers = self.leases.renew_many(known) if known else []
            self.metrics.set("renew_seconds", time.monotonic() - began)
            heard |= {lease.session: answer for lease, answer in zip(known, answers, strict=True)}
        lost = {}
        for session, answer in heard.items():
            if isinstance(answer, Lost) and answer.why is not Why.GONE:
                lost[session] = answer
            else:
                self._heard(live[session], answer)
        self._lost(lost, live)
        if renew:
            self.name.keep()
        waiting = self.handovers.step()
        self.parkings.step()
        self._write_metrics(live)
        return bool(live or self.ending or waiting)

    def look(self) -> dict[str, Record]:
        """The sessions that live here by their records. One whose record became unreadable while its holder lives is
        still what it was."""
        found, away = [], threading.Event()
        for session in self.this_host.ids():
            try:
                record = self.this_host.load(session)
                if record is None and session in self.known and self.this_host.is_held(session):
                    record = self.known[session]
            except OSError as error:
                _log.warning("session %s: %s", session, error)
                record = self.known.get(session)
            if record is not None:
                found.append(record)
        live = self.known = {one.session: one for one in found if one.phase == "live"}  # before the store is asked
        self.met = {(one.session, one.token) for one in found if self._meet(one, away)}
        return live

    def _meet(self, record: Record, away: threading.Event) -> bool:
        """One that came and went between two looks leaves a lease that nobody else lets go of, until it runs out.
        False: look again."""
        if record.phase != "exited":
            return record.phase not in ("starting", "restoring")
        if (record.session, record.token) in self.met if self.met is not None else not reconcile.is_unsure(record):
            return True
        answer = self._resume_one(record, away)
        if isinstance(answer, Held):
            self.ending[record.session] = answer
        return not isinstance(answer, LeaseUnreachable)

    def _settle(self, live: dict[str, Record]) -> None:
        """Leases of incarnations that are no more. A newer one of the same session is another matter."""
        for session, lease in list(self.held.items()):
            if session in live and live[session].token == lease.token:
                continue
            del self.held[session]
            self.lines.drop(session)
            owed = self.ending.get(session)  # one that was back, and has ended as well
            if session not in live and (owed is None or owed.token < lease.token):
                self.ending[session] = lease
        for session, lease in list(self.ending.items()):
            if self._ended(lease):
                del self.ending[session]
        for some in (self.unsure, self.parking, self.silent):
            some &= live.keys()
        self.lines.keep(live)
        for session in self.told.keys() - live.keys():
            del self.told[session]

    def _ended(self, lease: Held) -> bool:
        """It is over here, and the lease store says so too. A parked one has been let go of by who parked it, or died
        here while its memory was coming; of one whose holder died the last checkpoint may still be restored."""
        record = self.this_host.load(lease.session)
        try:
            if record is not None and record.phase == "parked" and record.checkpoint:
                self.leases.park(lease, record.checkpoint)
            elif record is None or record.phase == "exited":
                died = record is not None and record.exit is not None and record.exit.code is None
                self.leases.release(lease, keep_checkpoint=died)
        except CmdopError as error:
            _log.warning("the lease of %s is not let go of yet: %s", lease.session, error.message)
            return not isinstance(error, LeaseUnreachable)
        return True

    def _resume(self, this_host: Sequence[Record]) -> dict[str, Answer]:
        """Sessions that run here, and that this agent does not know yet."""
        if not this_host:
            return {}
        # Several at once where that is quicker. When the store does not answer for one, it will not for the others.
        with ThreadPoolExecutor(max(1, self.leases.register.threads), "resume") as pool:
            away = threading.Event()
            answers = list(pool.map(lambda record: self._resume_one(record, away), this_host))
        return {record.session: answer for record, answer in zip(this_host, answers, strict=True)}

    def _resume_one(self, record: Record, away: threading.Event) -> Answer:
        if away.is_set():
            return LeaseUnreachable("the lease store does not answer", "")
        try:
            return host_leases.resume(self.leases, self.this_host, record)
        except LeaseUnreachable as error:
            away.set()
            return error
        except CmdopError as error:
            return error

    def _heard(self, record: Record, answer: Answer) -> None:
        if not isinstance(answer, Held):
            self._doubt(record, answer)
            return
        with self.stand_in.lock:
            self.held[record.session] = answer
        self.metrics.add("renewals_total")
        if record.session in self.unsure:
            self.unsure.discard(record.session)
            self._note("lease_renewed", record)
        told = self.lines.say(
            record.session, op="fresh", until=answer.fresh_until, since=answer.started, token=answer.token
        )
        (self.silent.discard if told else self.silent.add)(record.session)

    def _doubt(self, record: Record, answer: Lost | CmdopError) -> None:
        """Nothing is known: the store is away, or has lost or cannot read what it had. The holder stops the session
        when its time is over; should it hang, `stand_in` does."""
        self.metrics.add("renewal_failures_total")
        why = answer.message if isinstance(answer, CmdopError) else str(answer)
        if record.session not in self.unsure:
            self.unsure.add(record.session)
            _log.warning("session %s: %s", record.name, why)
            self._note("lease_unsure", record, reason=why)

    def _note(self, event: str, record: Record, **facts: object) -> None:
        """On a full disk the other sessions need us all the same, and so does what is to be ended."""
        try:
            self.this_host.events.emit(event, record.session, name=record.name, token=record.token, **facts)
        except OSError as error:
            _log.warning("session %s: %s: %s", record.name, event, error)

    def _lost(self, lost: dict[str, Lost], live: dict[str, Record]) -> None:
        """Not ours any more: whatever the holders do, not one more step of these. The grip is taken before the record
        is read: an incarnation that is made here meanwhile is not touched."""
        with contextlib.ExitStack() as stack:
            to_kill = []
            for session, answer in lost.items():
                record = live[session]
                with contextlib.suppress(FileNotFoundError):
                    grip = stack.enter_context(cgroup.Grip(self.this_host.cgroup(session)))
                    self.held.pop(session, None)
                    if is_still(self.this_host, record):
                        grip.freeze()
                        if self._tell_lost(record, answer):
                            to_kill.append((session, grip))
            until = time.monotonic() + LAST_WORD
            while time.monotonic() < until and any(
                cgroup.is_populated(self.this_host.cgroup(session)) for session, _ in to_kill
            ):
                time.sleep(0.005)
            for _, grip in to_kill:
                grip.kill()
        for session, _ in to_kill:
            self._fenced(live[session], lost[session])

    def _tell_lost(self, record: Record, lost: Lost) -> bool:
        """-> whether it is to be killed from here, should the holder not do it at once."""
        holder = lost.holder
        if lost.why is Why.PARKED and holder is not None and holder.checkpoint:
            # Whoever parked it, or its holder, ends it, and notes it as parked; if not by the next round, we do.
            self.lines.say(record.session, op="parked", checkpoint=holder.checkpoint)
            again = record.session in self.parking
            self.parking.add(record.session)
            return again
        token, host = (holder.token, holder.host) if holder else (record.token + 1, "nobody")
        self.metrics.add("superseded_total")
        self._note("superseded", record, by=token, where=host, boottime=round(clock.boottime(), 6))
        self.lines.say(record.session, op="superseded", token=max(token, record.token + 1), host=host)
        return True

    def _fenced(self, record: Record, lost: Lost) -> None:
        """It was killed. Whoever has a hook for that hears it once; nobody here waits for it."""
        if lost.why is not Why.PARKED and self.told.get(record.session) != record.token:
            self.told[record.session] = record.token
            self.hooks.submit(self._tell_hooks, replace(record, pid=None), lost)

    def _tell_back(self, session: str, token: int) -> None:
        self.hooks.submit(ownership.tell_hooks, self.this_host, session, token)

    def _tell_hooks(self, record: Record, lost: Lost) -> None:
        host, token = (lost.holder.host, lost.holder.token) if lost.holder else (None, None)
        facts = {"reason": str(lost.why), "from": self.config.host, "to": host, "by": token}
        try:
            hooks.run(self.this_host, hooks.ON_FENCE, record, **facts)
        except OSError:  # a full disk
            _log.error("hooks of session %s", record.name, exc_info=True)

    def _write_metrics(self, live: dict[str, Record]) -> None:
        self.metrics.set("sessions", len(live))
        self.metrics.set("sessions_unsure", len(self.unsure))
        self.metrics.set("holders_silent", len(self.silent))
        self.metrics.set("idle_seconds_max", max(self.lines.idle.values(), default=0.0))
        self.metrics.set("host_name_held", self.name.is_ours)
        with contextlib.suppress(OSError):
            self.metrics.write()


def serve(this_host: Host, until_idle: bool, ready: Callable[[CmdopError | None], None]) -> None:
    """What `cmdop-migrate agent` does. `ready` hears None, or what is wrong though it goes on: sessions that live here
    need it, whether or not the lease store or the name can be had."""
    lock = Lock.take(this_host.config, patience=1.0)
    if lock is None:
        raise Blocked(f"{this_host.config.host} has an agent already", "One is enough; see: cmdop-migrate ls")
    kept = supervisor.of(this_host.config)
    try:
        lock.note(this_host.config.relay)
        agent = Agent(this_host, host_leases.open_store(this_host.config, fresh=not until_idle), lock, until_idle)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: agent.stopped.set())
        group = os.path.join(os.path.dirname(this_host.cgroup("agent")), "agent")
        cgroup.create(group)
        cgroup.join(group)  # out of the login session it may have been started from
        agent.stand_in.start()  # before the lease store is asked for anything: it may not answer
        agent.look()
        trouble: CmdopError | None = None
        try:
            agent.name.take(agent.stopped.is_set)
        except (Fenced, Unreachable) as error:
            if not any(record.phase in ("live", "handing") for record in this_host.all()):
                raise
            trouble = error
        agent.step()
        ready(trouble)
        for ward in kept:
            ward.start()
        agent.vigil.start()
        agent.run()
        agent.vigil.stop()
        agent.stand_in.stop()
        agent.metrics.remove()
    finally:
        for ward in kept:
            ward.stop()
        lock.release()
