"""Run the agent, one process per host: renew the leases of all its sessions, and send each holder its new deadline.

The agent may die at any moment and be started again: sessions do not notice until their lease deadline, and are then
frozen until an agent is back. When it finds that a session belongs to another host, it ends the local copy itself,
whether or not the holder answers.
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
from cmdop_migrate.agent.deadline_watchdog import DeadlineWatchdog, is_current
from cmdop_migrate.agent.holder_connections import HolderConnections
from cmdop_migrate.agent.metrics import agent_metrics
from cmdop_migrate.agent.move_recovery import MoveRecovery
from cmdop_migrate.agent.pause_watchdog import PauseWatchdog
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
from cmdop_migrate.migration import ownership, prefetch
from cmdop_migrate.model import Record

IDLE_ROUNDS = 2  # rounds without work after which an agent started on demand exits
CHECK_RECORDS_EVERY = 0.2  # seconds between two looks at the records
PARALLEL_HOOKS = 4
RECORD_WITHIN = 0.3  # seconds for a holder to record the reason before the agent kills its session
_log = log.get("agent")
Answer = Held | Lost | CmdopError


class Agent:
    """Hold the state of the agent: the leases that it renews, and what it knows about each session."""

    def __init__(self, this_host: Host, leases: LeaseStore, lock: Lock, until_idle: bool) -> None:
        self.this_host, self.leases, self.config, self.lock = this_host, leases, this_host.config, lock
        self.until_idle = until_idle
        self.stopped = threading.Event()
        self.held: dict[str, Held] = {}
        self.known: dict[str, Record] = {}
        self.releasing: dict[str, Held] = {}
        # (session, token) of the incarnations that were seen alive, or seen to have ended; None before the first look.
        self.seen: set[tuple[str, int]] | None = None
        self.unsure: set[str] = set()  # sessions whose lease could not be renewed
        self.parking: set[str] = set()  # live sessions whose lease was parked
        self.silent: set[str] = set()  # sessions whose holder does not take messages
        self.notified: dict[str, int] = {}  # session -> token of the incarnation whose on-fence hooks have run
        self.holders = HolderConnections(this_host.socket)
        self.metrics = agent_metrics(self.config.run_dir)
        self.name = HostName(leases, this_host)
        self.hooks = ThreadPoolExecutor(PARALLEL_HOOKS, "hooks")  # only the end of this process waits for them
        self.move_recovery = MoveRecovery(this_host, leases, self._run_thaw_hooks)
        self.reconciler = reconcile.Reconciler(this_host, leases)
        self.pause_watchdog = PauseWatchdog(this_host.socket, lambda: list(self.known))
        self.deadline_watchdog = DeadlineWatchdog(this_host, lambda: self.known, self.held)

    def run(self) -> None:
        """Run rounds until the agent is stopped or, if it was started on demand, until there is nothing to do."""
        idle, due = 0, clock.boottime()
        while not self.stopped.is_set():
            stamp = self._stamp()
            renew = clock.boottime() >= due or self.pause_watchdog.found
            if renew:
                self.pause_watchdog.renewing()
                due = clock.boottime() + margins.renew_every(self.config.lease_ttl)
            try:
                busy = self.step(renew)
                idle = 0 if busy else idle + 1
                if self.until_idle and idle >= IDLE_ROUNDS and self._may_leave():
                    return
            except Exception:  # noqa: BLE001 - a supervising loop: a step that fails in one round may work in the next
                _log.error("a round of the agent failed", exc_info=True)
                self.metrics.add("round_failures_total")
                busy, due = True, min(due, clock.boottime() + 1.0)
            self._sleep(due, stamp if busy else None)

    def _sleep(self, due: float, stamp: object) -> None:
        """Sleep until `due`, or until a record was added, removed or changed since `stamp`."""
        while clock.boottime() < due:
            if self.stopped.wait(min(CHECK_RECORDS_EVERY, max(0.0, due - clock.boottime()))):
                return
            if stamp is None or self.pause_watchdog.found or self._stamp() != stamp:
                return

    def _stamp(self) -> object:
        """Return a value that changes when a record is added, removed or changed."""
        stamps = []
        for session in sorted(self.this_host.ids()):
            try:
                stamps.append((session, os.stat(self.this_host.directory(session) / "session.json").st_mtime_ns))
            except OSError:
                stamps.append((session, 0))
        return stamps

    def _may_leave(self) -> bool:
        """Release name and lock if no command is starting or restoring a session, which would rely on this agent."""
        with self.this_host.locked():
            if prefetch.sweep(self.config.state_dir) or any(map(self.this_host.is_held, self.this_host.ids())):
                return False
            self.name.let_go()
            self.metrics.remove()
            self.lock.release()
            return True

    def step(self, renew: bool = True) -> bool:
        """Run one round: take on new sessions, release the leases of ended ones and, with `renew`, renew every lease
        and send every holder its deadline. Return whether there is anything to do."""
        live = self.look()
        self._settle(live)
        answers = self._resume([record for record in live.values() if record.session not in self.held])
        if renew:
            known = [lease for lease in self.held.values() if lease.session not in answers]
            began = time.monotonic()
            renewed = self.leases.renew_many(known) if known else []
            self.metrics.set("renew_seconds", time.monotonic() - began)
            answers |= {lease.session: answer for lease, answer in zip(known, renewed, strict=True)}
        lost = {}
        for session, answer in answers.items():
            if isinstance(answer, Lost) and answer.why is not Why.GONE:
                lost[session] = answer
            else:
                self._handle(live[session], answer)
        self._end_lost(lost, live)
        if renew:
            self.name.keep()
        waiting = self.move_recovery.step()
        self.reconciler.step()
        self._write_metrics(live)
        return bool(live or self.releasing or waiting)

    def look(self) -> dict[str, Record]:
        """Return the sessions that are live by their records. A session whose record became unreadable while its holder
        lives counts as before."""
        records, unreachable = [], threading.Event()
        for session in self.this_host.ids():
            try:
                record = self.this_host.load(session)
                if record is None and session in self.known and self.this_host.is_held(session):
                    record = self.known[session]
            except OSError as error:
                _log.warning("session %s: %s", session, error)
                record = self.known.get(session)
            if record is not None:
                records.append(record)
        # Before the lease store is asked: the watchdogs read it.
        live = self.known = {record.session: record for record in records if record.phase == "live"}
        self.seen = {(record.session, record.token) for record in records if self._has_settled(record, unreachable)}
        return live

    def _has_settled(self, record: Record, unreachable: threading.Event) -> bool:
        """Tell whether an incarnation needs no further look. One that started and ended between two looks leaves a
        lease that no other process releases before it runs out: renew it, to release it. Return False to look again."""
        if record.phase != "exited":
            return record.phase not in ("starting", "restoring")
        if (record.session, record.token) in self.seen if self.seen is not None else not reconcile.is_unsure(record):
            return True
        answer = self._resume_one(record, unreachable)
        if isinstance(answer, Held):
            self.releasing[record.session] = answer
        return not isinstance(answer, LeaseUnreachable)

    def _settle(self, live: dict[str, Record]) -> None:
        """Release the leases of incarnations that have ended. A newer incarnation of the same session keeps its own."""
        for session, lease in list(self.held.items()):
            if session in live and live[session].token == lease.token:
                continue
            del self.held[session]
            self.holders.drop(session)
            newer = self.releasing.get(session)  # of an incarnation that was restored here, and has ended as well
            if session not in live and (newer is None or newer.token < lease.token):
                self.releasing[session] = lease
        for session, lease in list(self.releasing.items()):
            if self._release(lease):
                del self.releasing[session]
        for sessions in (self.unsure, self.parking, self.silent):
            sessions &= live.keys()
        self.holders.keep_only(live)
        for session in self.notified.keys() - live.keys():
            del self.notified[session]

    def _release(self, lease: Held) -> bool:
        """Release the lease of an incarnation that has ended here. Return False if the lease store is unreachable.

        The lease of a parked session was parked by the command that did it, unless the session died here during a lazy
        restore. If the holder died, the last checkpoint stays in the lease and can be restored.
        """
        record = self.this_host.load(lease.session)
        try:
            if record is not None and record.phase == "parked" and record.checkpoint:
                self.leases.park(lease, record.checkpoint)
            elif record is None or record.phase == "exited":
                died = record is not None and record.exit is not None and record.exit.code is None
                self.leases.release(lease, keep_checkpoint=died)
        except CmdopError as error:
            _log.warning("the lease of %s is not released yet: %s", lease.session, error.message)
            return not isinstance(error, LeaseUnreachable)
        return True

    def _resume(self, records: Sequence[Record]) -> dict[str, Answer]:
        """Renew the leases of sessions that run here and that this agent does not know yet."""
        if not records:
            return {}
        # In parallel where that is quicker. If the store does not answer for one, it will not for the others.
        with ThreadPoolExecutor(max(1, self.leases.register.threads), "resume") as pool:
            unreachable = threading.Event()
            answers = list(pool.map(lambda record: self._resume_one(record, unreachable), records))
        return {record.session: answer for record, answer in zip(records, answers, strict=True)}

    def _resume_one(self, record: Record, unreachable: threading.Event) -> Answer:
        if unreachable.is_set():
            return LeaseUnreachable("the lease store does not answer", "")
        try:
            return host_leases.resume(self.leases, self.this_host, record)
        except LeaseUnreachable as error:
            unreachable.set()
            return error
        except CmdopError as error:
            return error

    def _handle(self, record: Record, answer: Answer) -> None:
        """Handle the answer for one lease: send its holder the new deadline, or note the doubt."""
        if not isinstance(answer, Held):
            self._doubt(record, answer)
            return
        with self.deadline_watchdog.lock:
            self.held[record.session] = answer
        self.metrics.add("renewals_total")
        if record.session in self.unsure:
            self.unsure.discard(record.session)
            self._note("lease_renewed", record)
        sent = self.holders.send(
            record.session, op="fresh", until=answer.fresh_until, since=answer.started, token=answer.token
        )
        (self.silent.discard if sent else self.silent.add)(record.session)

    def _doubt(self, record: Record, answer: Lost | CmdopError) -> None:
        """Note that a lease could not be renewed: the store is unreachable, or has lost or cannot read the lease. The
        holder freezes the session at its deadline; if it hangs, `deadline_watchdog` does."""
        self.metrics.add("renewal_failures_total")
        why = answer.message if isinstance(answer, CmdopError) else str(answer)
        if record.session not in self.unsure:
            self.unsure.add(record.session)
            _log.warning("session %s: %s", record.name, why)
            self._note("lease_unsure", record, reason=why)

    def _note(self, event: str, record: Record, **facts: object) -> None:
        """Emit an event. On a full disk log it instead: the other sessions still have to be renewed, and lost ones
        ended."""
        try:
            self.this_host.events.emit(event, record.session, name=record.name, token=record.token, **facts)
        except OSError as error:
            _log.warning("session %s: %s: %s", record.name, event, error)

    def _end_lost(self, lost: dict[str, Lost], live: dict[str, Record]) -> None:
        """Freeze, then kill sessions that belong to another host now, without relying on their holders. The cgroup is
        opened before the record is read, so an incarnation that is created here in the meantime is not touched."""
        with contextlib.ExitStack() as stack:
            to_kill = []
            for session, answer in lost.items():
                record = live[session]
                with contextlib.suppress(FileNotFoundError):
                    grip = stack.enter_context(cgroup.Grip(self.this_host.cgroup(session)))
                    self.held.pop(session, None)
                    if is_current(self.this_host, record):
                        grip.freeze()
                        if self._notify_lost(record, answer):
                            to_kill.append((session, grip))
            until = time.monotonic() + RECORD_WITHIN
            while time.monotonic() < until and any(
                cgroup.is_populated(self.this_host.cgroup(session)) for session, _ in to_kill
            ):
                time.sleep(0.005)
            for _, grip in to_kill:
                grip.kill()
        for session, _ in to_kill:
            self._submit_fence_hooks(live[session], lost[session])

    def _notify_lost(self, record: Record, lost: Lost) -> bool:
        """Notify the holder that its session is lost. Return whether the agent has to kill it, should the holder not do
        so."""
        holder = lost.holder
        if lost.why is Why.PARKED and holder is not None and holder.checkpoint:
            # The command that parked it, or its holder, ends it and records it as parked; else we do, next round.
            self.holders.send(record.session, op="parked", checkpoint=holder.checkpoint)
            again = record.session in self.parking
            self.parking.add(record.session)
            return again
        token, host = (holder.token, holder.host) if holder else (record.token + 1, "unknown")
        self.metrics.add("superseded_total")
        self._note("superseded", record, by=token, where=host, boottime=round(clock.boottime(), 6))
        self.holders.send(record.session, op="superseded", token=max(token, record.token + 1), host=host)
        return True

    def _submit_fence_hooks(self, record: Record, lost: Lost) -> None:
        """Run the on-fence hooks of a killed incarnation, once, in the background."""
        if lost.why is not Why.PARKED and self.notified.get(record.session) != record.token:
            self.notified[record.session] = record.token
            self.hooks.submit(self._run_fence_hooks, replace(record, pid=None), lost)

    def _run_thaw_hooks(self, session: str, token: int) -> None:
        self.hooks.submit(ownership.tell_hooks, self.this_host, session, token)

    def _run_fence_hooks(self, record: Record, lost: Lost) -> None:
        host, token = (lost.holder.host, lost.holder.token) if lost.holder else (None, None)
        facts = {"reason": str(lost.why), "from": self.config.host, "to": host, "by": token}
        try:
            hooks.run(self.this_host, hooks.ON_FENCE, record, **facts)
        except OSError:  # the disk is full
            _log.error("on-fence hooks of session %s failed", record.name, exc_info=True)

    def _write_metrics(self, live: dict[str, Record]) -> None:
        self.metrics.set("sessions", len(live))
        self.metrics.set("sessions_unsure", len(self.unsure))
        self.metrics.set("holders_silent", len(self.silent))
        self.metrics.set("idle_seconds_max", max(self.holders.idle.values(), default=0.0))
        self.metrics.set("host_name_held", self.name.is_ours)
        with contextlib.suppress(OSError):
            self.metrics.write()


def serve(this_host: Host, until_idle: bool, ready: Callable[[CmdopError | None], None]) -> None:
    """Run the agent, as `cmdop-migrate agent` does. `ready` receives None, or an error that does not stop the agent:
    live sessions need it, whether or not the lease store or the name is available. Raise Blocked if this host has an
    agent already."""
    lock = Lock.take(this_host.config, timeout=1.0)
    if lock is None:
        raise Blocked(
            f"{this_host.config.host} has an agent already", "One agent per host is enough. See: cmdop-migrate ls"
        )
    children = supervisor.children(this_host.config)
    try:
        lock.note(this_host.config.relay)
        agent = Agent(this_host, host_leases.open_store(this_host.config, fresh=not until_idle), lock, until_idle)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: agent.stopped.set())
        group = os.path.join(os.path.dirname(this_host.cgroup("agent")), "agent")
        cgroup.create(group)
        cgroup.join(group)  # leave the login session that it may have been started from
        agent.deadline_watchdog.start()  # before the first request to the lease store, which may not answer
        agent.look()
        warning: CmdopError | None = None
        try:
            agent.name.take(agent.stopped.is_set)
        except (Fenced, Unreachable) as error:
            if not any(record.phase in ("live", "handing") for record in this_host.all()):
                raise
            warning = error
        agent.step()
        ready(warning)
        for child in children:
            child.start()
        agent.pause_watchdog.start()
        agent.run()
        agent.pause_watchdog.stop()
        agent.deadline_watchdog.stop()
        agent.metrics.remove()
    finally:
        for child in children:
            child.stop()
        lock.release()
