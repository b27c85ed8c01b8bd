"""Drain this host: move every session to another host, or park it in the store.

    flag      STATE_DIR/draining.json: no session starts here from now on
    resume    interrupted migrations are settled first, and the sessions of an interrupted drain
    place     schedule.py decides what is next; each session moves in a process of its own (runner.py)

If the drain is killed at any instant, migrations under way finish by themselves or with `resume`, and the next drain
continues. Only `undrain` removes the flag.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cmdop_migrate import clock
from cmdop_migrate.drain import capacity, schedule
from cmdop_migrate.drain.capacity import UnfitHost
from cmdop_migrate.drain.runner import DrainLimits, DrainRunner, Report
from cmdop_migrate.drain.schedule import Budget, DrainTarget, Planned
from cmdop_migrate.errors import Usage
from cmdop_migrate.host import drain_journal
from cmdop_migrate.host.drain_journal import Drains, DrainState, Entry
from cmdop_migrate.host.host import Host
from cmdop_migrate.migration import gather_facts
from cmdop_migrate.util.signals import Stop

MIN_BANDWIDTH = 1 << 20


@dataclass(frozen=True)
class DrainOptions:
    """Hold what `drain` was asked for. `hosts`: where to; empty: all known hosts. `deadline`: seconds from now; None:
    no limit. `park`: move nothing."""

    hosts: tuple[str, ...] = ()
    deadline: float | None = None
    park: bool = False
    parallel: int = 2
    bandwidth: int | None = None
    memory: int | None = None

    def check(self) -> None:
        """Raise Usage if the options cannot be met."""
        if self.deadline is not None and self.deadline <= 0:
            raise Usage("--deadline 0 leaves no time for anything", "Give it some, for example --deadline 10m.")
        if not 1 <= self.parallel <= schedule.PARALLEL_MAX:
            raise Usage(f"--parallel {self.parallel} is out of range", f"Between 1 and {schedule.PARALLEL_MAX}.")
        if self.bandwidth is not None and self.bandwidth < MIN_BANDWIDTH:
            raise Usage("--bandwidth is too little to send anything", "At least 1MiB, a second.")
        if self.park and self.hosts:
            raise Usage("--park moves nothing, --to says where", "Give one of the two.")

    def limits(self) -> DrainLimits:
        """Return the limits that the sessions are scheduled within."""
        memory = self.memory if self.memory is not None else capacity.memory_here() // 2
        seconds = self.deadline if self.deadline is not None else math.inf
        return DrainLimits(Budget(self.parallel, self.bandwidth, memory), seconds, self.park)


@dataclass(frozen=True)
class DrainPlan:
    """Describe what a drain would do: `planned` in the order of begin; `targets` and `unfit`: the hosts that were
    asked."""

    planned: tuple[Planned, ...]
    targets: tuple[DrainTarget, ...]
    unfit: tuple[UnfitHost, ...]


@dataclass(frozen=True)
class DrainResult:
    """Describe what a drain did with each session. `targets` and `unfit`: the hosts that were asked."""

    drain: str
    host: str
    entries: tuple[Entry, ...]
    targets: tuple[DrainTarget, ...]
    unfit: tuple[UnfitHost, ...]
    deadline_s: float | None
    deadline_kept: bool
    took_s: float
    interrupted: bool

    def of(self, *states: DrainState) -> list[Entry]:
        """Return the entries in one of these states."""
        return [entry for entry in self.entries if entry.state in states]


def dry_run(this_host: Host, options: DrainOptions) -> DrainPlan:
    """Return the schedule of a drain. Change nothing."""
    options.check()
    hosts = [] if options.park else capacity.names(this_host.config, options.hosts)
    here = [record for record in this_host.all() if record.phase == "live"]
    targets, unfit = capacity.targets(this_host, hosts, here[0]) if here else ([], [])
    measured, limits = gather_facts.measured(this_host), options.limits()
    loads = [limits.restrict(capacity.load(this_host, record, measured)) for record in here]
    planned = schedule.schedule(loads, targets, limits.budget, limits.seconds)
    return DrainPlan(tuple(planned), tuple(targets), tuple(unfit))


def drain(this_host: Host, options: DrainOptions, flags: Sequence[str], stop: Stop, report: Report) -> DrainResult:
    """Drain this host. `flags`: the global command-line flags, for the commands that it starts. `report` receives the
    progress. Raise Blocked if another command drains it, Usage if a target is this host itself."""
    options.check()
    began = clock.boottime()
    hosts = [] if options.park else capacity.names(this_host.config, options.hosts)
    drains = Drains(this_host.config.state_dir)
    with drains.alone():
        before = drain_journal.read_flag(this_host.config.state_dir)
        journal = (drains.find(before.drain) if before else None) or drains.begin(this_host.config.host)
        with this_host.locked():
            drain_journal.write_flag(this_host.config.state_dir, journal.id)
        try:
            runner = DrainRunner(this_host, drains, journal, options.limits(), flags, stop, report, hosts)
        except Usage:
            if before is None:  # nothing was begun: leave the host as it was
                with this_host.locked():
                    drain_journal.clear_flag(this_host.config.state_dir)
            raise
        this_host.events.emit("drain_started", drain=journal.id, to=hosts, deadline_s=options.deadline)
        runner.run()
        result = DrainResult(
            drain=journal.id,
            host=this_host.config.host,
            entries=tuple(runner.done.values()),
            targets=tuple(runner.asked),
            unfit=tuple(runner.unfit),
            deadline_s=options.deadline,
            deadline_kept=clock.boottime() <= runner.ends_at,
            took_s=round(clock.boottime() - began, 3),
            interrupted=bool(stop.times),
        )
        states: tuple[DrainState, ...] = ("moved", "parked", "failed", "left", "ended")
        counts = {state: len(result.of(state)) for state in states}
        this_host.events.emit("drained", drain=journal.id, took_s=result.took_s, sessions=counts)
        return result
