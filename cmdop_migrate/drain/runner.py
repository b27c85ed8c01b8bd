"""Run a drain: move or park the sessions of this host, several at a time, until none is left or the time is over.

The schedule is computed anew whenever a place is free, with the time that is left and the targets that still answer. If
a session fails, the runner finds out where it is, then tries another target, then parks it, then leaves it here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cmdop_migrate import clock, log
from cmdop_migrate.config import ENV_PREFIX
from cmdop_migrate.drain import capacity, schedule
from cmdop_migrate.drain.capacity import UnfitHost
from cmdop_migrate.drain.schedule import Budget, Busy, Load, Planned
from cmdop_migrate.host import listing, move_journal, talk
from cmdop_migrate.host.drain_journal import Drain, Drains, DrainState, Entry
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import End, Moves
from cmdop_migrate.migration import gather_facts
from cmdop_migrate.model import Record
from cmdop_migrate.util.self_exec import Ended, Worker
from cmdop_migrate.util.signals import Stop
from cmdop_migrate.util.timings import Phases

LOOP_EVERY = 0.1  # seconds between two rounds of the loop
LIST_EVERY = 1.0  # seconds between two looks at all sessions of this host
ASK_SHARE = 3  # one part in so many of the time is given to hosts to answer whether they take sessions
MOVE_TRIES = 2  # failed migrations of a session, to another target if there is one, before it is parked
OVERTIME = 30.0  # seconds after the deadline until commands under way are interrupted
ABANDON = 90.0  # seconds after the deadline until they are not waited for any more
UNDO = 3.0  # seconds until an interrupted migration has ended
UNSETTLED_TIMEOUT = 120.0  # seconds to wait for a session that is neither here nor away, when nothing else is left
UNTOUCHED = ("begin", "plan", "stand-by", "pre-ship")  # steps of a migration in which the session still runs
UNSETTLED = ("starting", "restoring", "handing")  # phases of a session that is neither here nor away
_log = log.get("drain")


@dataclass(frozen=True)
class DrainLimits:
    """Limit a drain: what may be under way simultaneously, for how many seconds, and whether all sessions are
    parked."""

    budget: Budget
    seconds: float
    park: bool

    def restrict(self, load: Load) -> Load:
        """Return the load marked as not to be moved if all sessions are to be parked."""
        return replace(load, stays="as asked") if self.park else load


@dataclass(frozen=True)
class DrainProgress:
    """Report what became of a session, or that it began (state `going`); which are under way, how many wait."""

    entry: Entry
    seconds: float
    under_way: tuple[str, ...]
    waiting: int


Report = Callable[[DrainProgress], None]


@dataclass(frozen=True)
class Job:
    """Hold a session under way: its plan, the process that moves or parks it, the pace that it was planned with."""

    planned: Planned
    worker: Worker
    pace: float

    @property
    def load(self) -> Load:
        return self.planned.load


class DrainRunner:
    """Move or park the sessions of this host, several at a time, within the limits."""

    def __init__(
        self,
        this_host: Host,
        drains: Drains,
        journal: Drain,
        limits: DrainLimits,
        flags: Sequence[str],
        stop: Stop,
        report: Report,
        hosts: Sequence[str],
    ) -> None:
        self.this_host, self.drains, self.journal, self.limits = this_host, drains, journal, limits
        self.flags, self.stop, self.report = flags, stop, report
        self.budget = limits.budget
        self.ends_at = clock.boottime() + limits.seconds
        self.moves = Moves(this_host.config.state_dir, this_host.config.keep_exited)
        self.phases = Phases("drain")
        self.waiting: dict[str, Load] = {}
        self.jobs: list[Job] = []
        self.undecided: dict[str, tuple[Job, Ended]] = {}  # failed commands whose session may still be here or away
        self.done: dict[str, Entry] = {}
        self.listed_at = -math.inf
        self.unsettled: list[Record] = []
        self.resuming: Worker | None = None
        self.idle_since = clock.boottime()
        here = [record for record in this_host.all() if record.phase in ("live", *UNSETTLED)]
        self.asked, self.unfit = (
            capacity.targets(this_host, hosts, here[0], limits.seconds / ASK_SHARE) if here else ([], [])
        )
        self.targets = {target.name: target for target in self.asked}

    def run(self) -> None:
        """Move or park all sessions. Return when none is left, when the time is over, or after an interrupt."""
        self.phases.reach("flagged")
        if any(not move.told for move in self.moves.all()):  # migrations that were interrupted, of any command
            self.resuming = Worker(self.flags, ["resume"])
        while True:
            self._collect()
            unsettled = self._list()
            if not self.jobs and (self._is_over() or not (self.waiting or unsettled or self.resuming)):
                break
            if not self._is_over():
                while self._start():
                    pass
            self._hurry()
            time.sleep(LOOP_EVERY)
        self._leave_the_rest()

    def _is_over(self) -> bool:
        """Tell whether nothing more is begun: the time is over, or the drain was interrupted."""
        return bool(self.stop.times) or clock.boottime() >= self.ends_at

    def _list(self) -> list[Record]:
        """Add the sessions that run here to those that wait. Return the sessions that are neither here nor away:
        starting, moved by another command, or not decided by the agent yet."""
        if clock.boottime() - self.listed_at < LIST_EVERY:
            return self.unsettled
        self.listed_at = clock.boottime()
        self.this_host.sweep()
        for load in list(self.waiting.values()):
            record = self.this_host.load(load.session)
            if record is None or record.phase != "live":  # it ended, or another command took it
                del self.waiting[load.session]
                self._find_out(Entry(load.session, load.name, "going"))
        taken = {job.load.session for job in self.jobs} | self.waiting.keys() | self.done.keys()
        rest = [record for record in self.this_host.all() if record.session not in taken]
        measured = gather_facts.measured(self.this_host)
        for record in rest:
            if record.phase == "live" and record.session in self.undecided:
                self._retry(*self.undecided.pop(record.session))
            elif record.phase == "live":
                self.waiting[record.session] = self.limits.restrict(capacity.load(self.this_host, record, measured))
        for entry in self.journal.of("going") if self.resuming is None else []:  # otherwise it may still change
            if entry.session not in taken and entry.session not in self.waiting:
                self._find_out(entry)
        self.unsettled = [record for record in rest if record.phase in UNSETTLED]
        if self.jobs or self.waiting:
            self.idle_since = clock.boottime()
        if clock.boottime() - self.idle_since > UNSETTLED_TIMEOUT:
            for record in self.unsettled:
                why = f"it is {talk.state_of(record, {})}, for too long"
                self._leave(Entry(record.session, record.name, "left", why=why))
            self.unsettled = []
        return self.unsettled

    def _start(self) -> bool:
        """Start the next session if the budget has a place for it. Return whether one was started."""
        if len(self.jobs) >= self.budget.parallel or not self.waiting:
            return False
        now = clock.boottime()
        busy = [
            Busy(job.load.memory, max(0.1, job.worker.began + job.planned.end_s - now), job.planned.target)
            for job in self.jobs
        ]
        left, targets = self.ends_at - now, list(self.targets.values())
        planned = schedule.schedule(list(self.waiting.values()), targets, self.budget, left, busy)
        for candidate in planned:
            if candidate.begin_s > 0.0 or candidate.how == "leave":
                break
            if self._is_free(candidate.load.session):
                self._begin(candidate, schedule.proof_deadline(candidate, planned, left))
                return True
        return False

    def _is_free(self, session: str) -> bool:
        """Tell whether no other command works on the session: neither one left over from a drain that was killed, nor
        `resume`, which settles what that drain left behind."""
        if self.resuming is not None and any(move.session == session and not move.end for move in self.moves.all()):
            return False
        return is_free(self.this_host, self.moves, session)

    def _begin(self, planned: Planned, deadline: float) -> None:
        """Start the command for one session. `deadline`: seconds within which a park must be done, its proof
        included."""
        load = self.waiting.pop(planned.load.session)
        entry = Entry(load.session, load.name, "going", planned.target, planned.why)
        self._note(entry)
        words = ["checkpoint", load.session, "--tag", "drain"]
        if math.isfinite(deadline):
            words += ["--deadline", f"{deadline:.1f}s"]
        if planned.target is not None:
            words = ["migrate", load.session, "--to", planned.target]
            self.targets[planned.target] = self.targets[planned.target].plus(load)
        share = self.budget.share
        environ = {f"{ENV_PREFIX}BANDWIDTH": f"{share}B"} if share is not None else {}
        self.jobs.append(Job(planned, Worker(self.flags, words, environ), self.budget.pace))
        self._tell(entry)
        self.phases.reach("begun")

    def _collect(self) -> None:
        """Handle the commands that have ended."""
        if self.resuming is not None and (ended := self.resuming.ended()) is not None:
            self.resuming, self.listed_at = None, -math.inf  # what was listed before it ended is out of date
            if not ended.ok:
                _log.info("not all interrupted migrations could be settled: %s", ended.message)
        for job in list(self.jobs):
            if (ended := job.worker.ended()) is not None:
                self.jobs.remove(job)
                self.listed_at = -math.inf
                self._job_ended(job, ended)

    def _job_ended(self, job: Job, ended: Ended) -> None:
        """Record a success, or find out where the session of a failed command is: here (try again), away, or not
        decided yet."""
        load, target = job.load, job.planned.target
        record = self.this_host.load(load.session)
        seconds = clock.boottime() - job.worker.began
        if ended.ok:
            self._keep_pace(job, seconds)
            kept = (
                "token",
                "checkpoint",
                "frozen_s",
                "downtime_s",
                "took_s",
                "closed_connections",
                "proved",
                "skipped",
            )
            facts = {key: ended.answer[key] for key in kept if key in ended.answer}
            state: DrainState = "moved" if target is not None else "parked"
            self._end(Entry(load.session, load.name, state, target, job.planned.why, facts), seconds)
        elif record is None or record.phase != "live":
            if record is None or record.phase in ("exited", "parked"):
                parked = record is not None and record.phase == "parked"
                why = job.planned.why or (f"not moved: {ended.message}" if parked else "")
                self._find_out(Entry(load.session, load.name, "going", target, why), seconds)
            else:
                self.undecided[load.session] = (job, ended)
        else:
            self._retry(job, ended)

    def _keep_pace(self, job: Job, seconds: float) -> None:
        """Adjust the pace to the time that a session took. The old estimate keeps half of the weight, because one slow
        session does not make a slow host."""
        guessed = (job.planned.end_s - job.planned.begin_s) / job.pace
        seen = min(max(seconds / guessed, 0.5), 10.0)
        self.budget = replace(self.budget, pace=(self.budget.pace + seen) / 2)

    def _retry(self, job: Job, ended: Ended) -> None:
        """Schedule a session again whose command failed and which still runs here: to another target, then to the
        store, then not at all."""
        load, target = job.load, job.planned.target
        _log.info("%s: %s %s: %s", load.name, job.planned.how, target or "", ended.message)
        if target is None:
            why = "; ".join(part for part in (job.planned.why, f"not parked: {ended.message}") if part)
            self._end(Entry(load.session, load.name, "failed", why=why))
            return
        if target in self.targets:
            self.targets[target] = self.targets[target].plus(load, -1)
        if ended.code in ("peer_failed", "host_key_refused", "peer_differs") and target in self.targets:
            del self.targets[target]
            self.unfit = [*self.unfit, UnfitHost(target, ended.message)]
        tried = load.tried + 1
        others = self.targets.keys() - load.refused - {target}
        refused = (
            load.refused | {target} if others else load.refused
        )  # the only target is tried again: the failure may be temporary
        may_retry = ended.status in (4, 9) and not job.worker.interrupted
        again = may_retry and tried < MOVE_TRIES and self.targets.keys() - refused
        why = "no time to move it" if job.worker.interrupted else f"not moved: {ended.message}"
        self.waiting[load.session] = replace(load, refused=refused, tried=tried, stays="" if again else why)

    def _find_out(self, entry: Entry, seconds: float = 0.0) -> None:
        """Record where a session went that was begun and is not here any more: parked, moved or ended."""
        record = self.this_host.load(entry.session)
        if record is not None and record.phase == "parked":
            facts = {"checkpoint": record.checkpoint}
            self._end(replace(entry, state="parked", to=None, facts=facts), seconds)
        elif record is None or record.phase == "exited":
            moves = [move for move in self.moves.all() if move.session == entry.session]
            if moves and (move_journal.has_moved(record) or moves[-1].end is End.ON_TARGET):
                self._end(replace(entry, state="moved", to=moves[-1].target), seconds)
            else:
                reason = record.exit.reason if record is not None and record.exit else "it was removed"
                self._end(replace(entry, state="ended", to=None, why=reason), seconds)

    def _hurry(self) -> None:
        """Interrupt a migration that has not reached the freeze when there is just enough time left to park. Interrupt
        all commands OVERTIME seconds after the deadline, or at the second interrupt; stop waiting for them at ABANDON
        seconds, or at the third interrupt."""
        now = clock.boottime()
        for job in self.jobs:
            latest = self.ends_at - UNDO - schedule.park_seconds(job.load, self.budget)
            late = job.planned.target is not None and now > latest and self._step(job) in UNTOUCHED
            if late or now > self.ends_at + OVERTIME or self.stop.times > 1:
                job.worker.interrupt()
        if now > self.ends_at + ABANDON or self.stop.times > 2:
            why = "still under way; see: cmdop-migrate resume"
            for job in self.jobs:
                self._leave(Entry(job.load.session, job.load.name, "left", why=why))
            self.jobs = []

    def _step(self, job: Job) -> str:
        """Return the current step of a job's migration; `end`, which is not one of the steps, if it has ended."""
        session, since = job.load.session, job.worker.since
        moves = [move for move in self.moves.all() if move.session == session and move.started >= since]
        return "end" if moves and moves[-1].end else moves[-1].step if moves else UNTOUCHED[0]

    def _leave_the_rest(self) -> None:
        """Record all sessions that were not begun, or did not settle, as left."""
        why = "interrupted" if self.stop.times else "the deadline passed"
        for load in self.waiting.values():
            self._end(Entry(load.session, load.name, "left", why="; ".join(filter(None, (load.stays, why)))))
        for record in self.unsettled:
            state = talk.state_of(record, {})
            self._leave(Entry(record.session, record.name, "left", why=f"it is {state}; {why}"))

    def _leave(self, entry: Entry) -> None:
        """Stop waiting for this session. It stays `going` in the journal, because it may still leave: the next drain
        checks it."""
        self.done[entry.session] = entry
        begun = {going.session: going.to for going in self.journal.of("going")}
        self._note(replace(entry, state="going", to=begun.get(entry.session)))
        self._tell(entry)

    def _end(self, entry: Entry, seconds: float = 0.0) -> None:
        """Record the final state of a session and report it."""
        self.done[entry.session] = entry
        self._note(entry)
        self._tell(entry, seconds)

    def _tell(self, entry: Entry, seconds: float = 0.0) -> None:
        under_way = tuple(f"{job.load.name} to {job.planned.target or 'the store'}" for job in self.jobs)
        self.report(DrainProgress(entry, seconds, under_way, len(self.waiting)))

    def _note(self, entry: Entry) -> None:
        """Write an entry to the journal. A full disk is logged and ignored."""
        self.journal = self.journal.with_entry(entry)
        try:
            self.drains.save(self.journal)
        except OSError as error:  # the disk is full: continue; the next entry that is written includes this one
            _log.warning("the drain journal entry of %s cannot be written: %s", entry.name, error)


def is_free(this_host: Host, moves: Moves, session: str) -> bool:
    """Tell whether a session runs here and no other command works on it, for example one left over from a drain that
    was killed."""
    with moves.lock(session) as is_ours:
        if not is_ours:
            return False
    record = this_host.load(session)
    if record is None or record.phase != "live":
        return False
    return listing.row(this_host, record).state != "checkpointing"
