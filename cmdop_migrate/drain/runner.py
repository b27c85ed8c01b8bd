"""The sessions of a host, one after the other and several at once, until none is left or the time is over.

The schedule is made anew whenever a place is free, with the time that is left and the targets that still answer. A
session that fails is looked at: it is tried on another target, then parked, then said to stay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cmdop_migrate import clock, log
from cmdop_migrate.config import ENV_PREFIX
from cmdop_migrate.drain import capacity, schedule
from cmdop_migrate.drain.capacity import Unfit
from cmdop_migrate.drain.drain_options import Said, Say, Wanted
from cmdop_migrate.drain.schedule import Busy, Load, Planned
from cmdop_migrate.host import move_journal, talk
from cmdop_migrate.host.drain_journal import Drain, Drains, Entry, State, is_free
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import End, Moves
from cmdop_migrate.migration import gather_facts
from cmdop_migrate.model import Record
from cmdop_migrate.util.self_exec import Ended, Worker
from cmdop_migrate.util.signals import Stop
from cmdop_migrate.util.timings import Phases

LOOK_EVERY = 0.1
LIST_EVERY = 1.0
ASKING = 3  # the part of the time that hosts have to say whether they take sessions
MOVE_TRIES = 2  # moves of a session that may fail, to another target where there is one, before it is parked
OVERTIME = 30.0  # seconds after the deadline for what is under way; then it is undone
ABANDON = 90.0  # … and then nobody waits for it any more
UNDO = 3.0  # seconds until a move that is interrupted has ended
PATIENCE = 120.0  # seconds for a session that is neither here nor away, when nothing else is to be done
UNTOUCHED = ("begin", "plan", "stand-by", "pre-ship")  # steps of a move in which the session still runs
UNSETTLED = ("starting", "restoring", "handing")  # phases of a session that is neither here nor away
_log = log.get("drain")


@dataclass(frozen=True)
class Job:
    planned: Planned
    worker: Worker
    pace: float  # that it was planned with

    @property
    def load(self) -> Load:
        return self.planned.load


class Evacuation:
    def __init__(
        self,
        this_host: Host,
        drains: Drains,
        made: Drain,
        wanted: Wanted,
        flags: Sequence[str],
        stop: Stop,
        say: Say,
        hosts: Sequence[str],
    ) -> None:
        self.this_host, self.drains, self.made, self.wanted = this_host, drains, made, wanted
        self.flags, self.stop, self.say = flags, stop, say
        self.budget = wanted.budget()
        self.ends_at = clock.boottime() + wanted.limit
        self.moves = Moves(this_host.config.state_dir, this_host.config.keep_exited)
        self.phases = Phases("drain")
        self.waiting: dict[str, Load] = {}
        self.jobs: list[Job] = []
        self.undecided: dict[str, tuple[Job, Ended]] = {}  # what failed, and nobody knows yet where the session is
        self.done: dict[str, Entry] = {}
        self.listed_at = -math.inf
        self.unsettled: list[Record] = []
        self.resuming: Worker | None = None
        self.idle_since = clock.boottime()
        here = [one for one in this_host.all() if one.phase in ("live", *UNSETTLED)]
        self.asked, self.unfit = (
            capacity.targets(this_host, hosts, here[0], wanted.limit / ASKING) if here else ([], [])
        )
        self.targets = {one.name: one for one in self.asked}

    def run(self) -> None:
        self.phases.reach("flagged")
        if any(not one.told for one in self.moves.all()):  # moves that were cut off, by whomever
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
            time.sleep(LOOK_EVERY)
        self._say_what_is_left()

    def facts(self, seconds: float) -> dict[str, Any]:
        lists = {
            state: [one.to_json() for one in self.done.values() if one.state == state]
            for state in ("moved", "parked", "failed", "left", "ended")
        }
        return {
            "drain": self.made.id,
            "host": self.this_host.config.host,
            **lists,
            "targets": capacity.hosts_json(self.asked, self.unfit),
            "deadline_s": self.wanted.deadline,
            "deadline_kept": clock.boottime() <= self.ends_at,
            "took_s": round(seconds, 3),
            "interrupted": bool(self.stop.times),
        }

    def _is_over(self) -> bool:
        """Nothing more is begun."""
        return bool(self.stop.times) or clock.boottime() >= self.ends_at

    def _list(self) -> list[Record]:
        """Takes up who runs here and is not seen to. -> those that are neither here nor away: just starting, moved by
        another command, or not decided by the agent yet."""
        if clock.boottime() - self.listed_at < LIST_EVERY:
            return self.unsettled
        self.listed_at = clock.boottime()
        self.this_host.sweep()
        for load in list(self.waiting.values()):
            record = self.this_host.load(load.session)
            if record is None or record.phase != "live":  # it ended, or somebody else took it
                del self.waiting[load.session]
                self._look(Entry(load.session, load.name, "going"))
        taken = {job.load.session for job in self.jobs} | self.waiting.keys() | self.done.keys()
        rest = [one for one in self.this_host.all() if one.session not in taken]
        measured = gather_facts.measured(self.this_host)
        for one in rest:
            if one.phase == "live" and one.session in self.undecided:
                self._again(*self.undecided.pop(one.session))
            elif one.phase == "live":
                self.waiting[one.session] = self.wanted.allows(capacity.load(self.this_host, one, measured))
        for entry in self.made.of("going") if self.resuming is None else []:  # else it may still change
            if entry.session not in taken and entry.session not in self.waiting:
                self._look(entry)
        self.unsettled = [one for one in rest if one.phase in UNSETTLED]
        if self.jobs or self.waiting:
            self.idle_since = clock.boottime()
        if clock.boottime() - self.idle_since > PATIENCE:
            for one in self.unsettled:
                self._leave(Entry(one.session, one.name, "left", why=f"it is {talk.state_of(one, {})}, for too long"))
            self.unsettled = []
        return self.unsettled

    def _start(self) -> bool:
        """The next one, if there is a place for it. -> whether one was started."""
        if len(self.jobs) >= self.budget.parallel or not self.waiting:
            return False
        now = clock.boottime()
        busy = [
            Busy(job.load.memory, max(0.1, job.worker.began + job.planned.end_s - now), job.planned.target)
            for job in self.jobs
        ]
        left, targets = self.ends_at - now, list(self.targets.values())
        planned = schedule.schedule(list(self.waiting.values()), targets, self.budget, left, busy)
        for one in planned:
            if one.begin_s > 0.0 or one.how == "leave":
                break
            if self._is_free(one.load.session):
                self._begin(one, schedule.proof_deadline(one, planned, left))
                return True
        return False

    def _is_free(self, session: str) -> bool:
        """No other command, left over from a drain that was killed, is at it; nor `resume`, which settles what that
        left behind."""
        if self.resuming is not None and any(one.session == session and not one.end for one in self.moves.all()):
            return False
        return is_free(self.this_host, self.moves, session)

    def _begin(self, planned: Planned, deadline: float) -> None:
        """Start the command for one session. `deadline`: seconds in which a park must be done, its proof included."""
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
        if self.resuming is not None and (told := self.resuming.ended()) is not None:
            self.resuming, self.listed_at = None, -math.inf  # what was seen before it ended says nothing of it
            if not told.ok:
                _log.info("not all that was cut off could be settled: %s", told.message)
        for job in list(self.jobs):
            ended = job.worker.ended()
            if ended is not None:
                self.jobs.remove(job)
                self.listed_at = -math.inf
                self._ended(job, ended)

    def _ended(self, job: Job, ended: Ended) -> None:
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
            state: State = "moved" if target is not None else "parked"
            self._end(Entry(load.session, load.name, state, target, job.planned.why, facts), seconds)
        elif record is None or record.phase != "live":
            if record is None or record.phase in ("exited", "parked"):
                parked = record is not None and record.phase == "parked"
                why = job.planned.why or (f"not moved: {ended.message}" if parked else "")
                self._look(Entry(load.session, load.name, "going", target, why), seconds)
            else:
                self.undecided[load.session] = (job, ended)
        else:
            self._again(job, ended)

    def _keep_pace(self, job: Job, seconds: float) -> None:
        """Half of what was believed, half of what was seen: one slow session is no slow host."""
        guessed = (job.planned.end_s - job.planned.begin_s) / job.pace
        seen = min(max(seconds / guessed, 0.5), 10.0)
        self.budget = replace(self.budget, pace=(self.budget.pace + seen) / 2)

    def _again(self, job: Job, ended: Ended) -> None:
        """It runs on here, though it should not: another target, then the store, then nothing."""
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
            self.unfit = [*self.unfit, Unfit(target, ended.message)]
        tried = load.tried + 1
        others = self.targets.keys() - load.refused - {target}
        refused = load.refused | {target} if others else load.refused  # the only one is asked again: things pass
        can = ended.status in (4, 9) and not job.worker.interrupted
        again = can and tried < MOVE_TRIES and self.targets.keys() - refused
        why = "no time to move it" if job.worker.interrupted else f"not moved: {ended.message}"
        self.waiting[load.session] = replace(load, refused=refused, tried=tried, stays="" if again else why)

    def _look(self, entry: Entry, seconds: float = 0.0) -> None:
        """What became of one that was begun and is not here any more."""
        record = self.this_host.load(entry.session)
        if record is not None and record.phase == "parked":
            facts = {"checkpoint": record.checkpoint}
            self._end(replace(entry, state="parked", to=None, facts=facts), seconds)
        elif record is None or record.phase == "exited":
            moves = [one for one in self.moves.all() if one.session == entry.session]
            if moves and (move_journal.has_moved(record) or moves[-1].end is End.ON_TARGET):
                self._end(replace(entry, state="moved", to=moves[-1].target), seconds)
            else:
                reason = record.exit.reason if record is not None and record.exit else "it was removed"
                self._end(replace(entry, state="ended", to=None, why=reason), seconds)

    def _hurry(self) -> None:
        """A move that has not come to the freeze when there is just time to park: parked. Long after the deadline, or
        told twice to stop: undone. Even later, or told thrice: left to itself."""
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
        """Of its move; of one that has ended, none of the steps."""
        moves = [one for one in self.moves.all() if one.session == job.load.session and one.started >= job.worker.since]
        return "end" if moves and moves[-1].end else moves[-1].step if moves else UNTOUCHED[0]

    def _say_what_is_left(self) -> None:
        why = "interrupted" if self.stop.times else "the deadline passed"
        for load in self.waiting.values():
            self._end(Entry(load.session, load.name, "left", why="; ".join(filter(None, (load.stays, why)))))
        for one in self.unsettled:
            self._leave(Entry(one.session, one.name, "left", why=f"it is {talk.state_of(one, {})}; {why}"))

    def _leave(self, entry: Entry) -> None:
        """Nobody waits for it any more, but it may go yet: on record it is begun, and who comes next looks for it."""
        self.done[entry.session] = entry
        begun = {one.session: one.to for one in self.made.of("going")}
        self._note(replace(entry, state="going", to=begun.get(entry.session)))
        self._tell(entry)

    def _end(self, entry: Entry, seconds: float = 0.0) -> None:
        self.done[entry.session] = entry
        self._note(entry)
        self._tell(entry, seconds)

    def _tell(self, entry: Entry, seconds: float = 0.0) -> None:
        under_way = tuple(f"{one.load.name} to {one.planned.target or 'the store'}" for one in self.jobs)
        self.say(Said(entry, seconds, under_way, len(self.waiting)))

    def _note(self, entry: Entry) -> None:
        self.made = self.made.with_entry(entry)
        try:
            self.drains.save(self.made)
        except OSError as error:  # a full disk is one more reason to go on; the next one that is written has them all
            _log.warning("what becomes of %s cannot be written down: %s", entry.name, error)
