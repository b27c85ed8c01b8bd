"""Schedule a drain: decide which session goes where, in which order, several at a time, before a deadline. Pure.

Sessions that cost little go first: when time runs out, as many as possible are gone. If not all can be moved in time,
the costliest are parked instead, which takes less; a session that no target has room for is parked too. A session that
could not even begin before the deadline is left.

The budget allows at most `parallel` sessions simultaneously and PER_TARGET to one host; their memory together at most
`memory`, except that a larger session goes alone. Each gets an equal share of the bandwidth, so that all together never
exceed it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

PARALLEL_MAX = 4
PER_TARGET = 4  # simultaneous calls to one host: its sshd accepts 10, and other clients need some
SPARE = 64 << 20  # bytes of memory and disk that a target keeps free
PARK_FIXED, MOVE_FIXED = 1.0, 3.0  # seconds to start commands and ask hosts
RATE = 100 << 20  # bytes of memory a second, if nothing was measured
RATIO = 4  # approximate compression ratio of memory
How = Literal["move", "park", "leave"]


@dataclass(frozen=True)
class Load:
    """Describe what one session costs to move. `memory`, `files`: its bytes; `send`: about those that the store does
    not have yet; `work_s`: seconds to dump and upload them without a bandwidth limit. `refused`: targets that it could
    not go to; `tried`: how many migrations of it failed; `stays`: why it is not to be moved at all."""

    session: str
    name: str
    memory: int
    files: int
    send: int
    work_s: float
    refused: frozenset[str] = frozenset()
    tried: int = 0
    stays: str = ""


@dataclass(frozen=True)
class DrainTarget:
    """Describe a host that takes sessions: the free bytes it reported, and those of the sessions that go there."""

    name: str
    memory: int
    disk: int
    takes_memory: int = 0
    takes_disk: int = 0
    takes: int = 0

    def room_for(self, load: Load) -> bool:
        """Tell whether this session fits too."""
        return (
            self.memory >= self.takes_memory + load.memory + SPARE
            and self.disk >= self.takes_disk + needed_disk(load) + SPARE
        )

    def plus(self, load: Load, sign: int = 1) -> DrainTarget:
        """Return the target with this session added; with `sign` -1, removed."""
        return replace(
            self,
            takes_memory=self.takes_memory + sign * load.memory,
            takes_disk=self.takes_disk + sign * needed_disk(load),
            takes=self.takes + sign,
        )

    @property
    def fullness(self) -> float:
        """Return what goes there as a fraction of its free memory. Small sessions count with at least SPARE bytes."""
        return (self.takes_memory + self.takes * SPARE) / max(1, self.memory)


@dataclass(frozen=True)
class Budget:
    """Limit what is under way. `bandwidth`: bytes a second to the store, all together; None: no limit. `memory`: bytes
    of the sessions under way. `pace`: how many times longer than estimated sessions take on this host, as measured so
    far."""

    parallel: int = 2
    bandwidth: int | None = None
    memory: int | None = None
    pace: float = 1.0

    @property
    def share(self) -> int | None:
        """Return the part of the bandwidth that each session under way gets."""
        return max(1, self.bandwidth // self.parallel) if self.bandwidth is not None else None


@dataclass(frozen=True)
class Busy:
    """Describe a session under way: its memory, about how many seconds it still takes, its target."""

    memory: int
    ends_s: float
    target: str | None = None


@dataclass(frozen=True)
class Planned:
    """Describe the plan for one session. `begin_s`, `end_s`: seconds from now. `why`: a reason for anything but a
    move."""

    load: Load
    how: How
    begin_s: float
    end_s: float
    target: str | None = None
    why: str = ""


def needed_disk(load: Load) -> int:
    """Return about how many bytes of disk a session takes on its target."""
    return load.memory // RATIO + load.files


def proof_deadline(park: Planned, planned: Sequence[Planned], left: float) -> float:
    """Return the seconds from now within which `park` must be done: its own time, and its share of what the whole plan
    leaves until the deadline. No time is left over while some session cannot go in time."""
    if any(other.how == "leave" for other in planned):
        return park.end_s
    spare = max(0.0, left - max(other.end_s for other in planned))
    return park.end_s + spare / max(1, sum(other.how == "park" for other in planned))


def park_seconds(load: Load, budget: Budget) -> float:
    """Estimate how long parking a session takes."""
    sending = load.send / budget.share if budget.share is not None else 0.0
    return budget.pace * (PARK_FIXED + max(load.work_s, sending))


def move_seconds(load: Load, budget: Budget) -> float:
    """Estimate how long moving a session takes."""
    return park_seconds(load, budget) + budget.pace * (MOVE_FIXED + needed_disk(load) / RATE)


def schedule(
    loads: Sequence[Load],
    targets: Sequence[DrainTarget],
    budget: Budget,
    time_s: float = math.inf,
    busy: Sequence[Busy] = (),
) -> list[Planned]:
    """Return a plan for each load, in the order in which they begin. `busy`: the sessions under way already, which
    count against the budget; `targets`: with what they have left besides those."""
    ordered = sorted(loads, key=lambda load: (move_seconds(load, budget), load.session))
    movable = [load for load in ordered if not load.stays]
    parked: dict[str, str] = {}
    while True:
        planned = _Simulation(targets, budget, time_s, busy, parked).run(ordered)
        moved = {plan.load.session for plan in planned if plan.how == "move"}
        late = [plan for plan in planned if plan.how == "leave" or plan.end_s > time_s]
        costliest = next((load for load in reversed(movable) if load.session in moved), None)
        if not late or costliest is None:
            return planned
        parked[costliest.session] = "no time to move it"


@dataclass
class _Simulation:
    """Play a drain through in time, session by session."""

    targets: Sequence[DrainTarget]
    budget: Budget
    time_s: float
    busy: Sequence[Busy]
    parked: dict[str, str]
    now: float = 0.0
    running: list[Busy] = field(default_factory=list)

    def run(self, loads: Sequence[Load]) -> list[Planned]:
        self.running = list(self.busy)
        room = {target.name: target for target in self.targets}
        return [self._place(load, room) for load in sorted(loads, key=self._seconds)]

    def _seconds(self, load: Load) -> tuple[float, str]:
        parks = bool(load.stays or load.session in self.parked)
        return (park_seconds if parks else move_seconds)(load, self.budget), load.session

    def _place(self, load: Load, room: dict[str, DrainTarget]) -> Planned:
        why = load.stays or self.parked.get(load.session, "")
        target = None if why else best(load, list(room.values()))
        if target is None:
            why = why or ("no host has room for it" if room else "no host to move it to")
        name = target.name if target else None
        while not self._fits(load, name):
            self._until_next_end()
        seconds = (move_seconds if target else park_seconds)(load, self.budget)
        planned = Planned(load, "move" if target else "park", self.now, self.now + seconds, name, why)
        if self.now >= self.time_s:
            return replace(planned, how="leave", end_s=self.now, target=None, why="no time even to park it")
        if target is not None:
            room[target.name] = target.plus(load)
        self.running.append(Busy(load.memory, planned.end_s, name))
        return planned

    def _fits(self, load: Load, target: str | None) -> bool:
        if not self.running:
            return True
        limit = self.budget.memory
        return (
            len(self.running) < self.budget.parallel
            and (limit is None or sum(busy.memory for busy in self.running) + load.memory <= limit)
            and (target is None or sum(busy.target == target for busy in self.running) < PER_TARGET)
        )

    def _until_next_end(self) -> None:
        self.now = max(self.now, min(busy.ends_s for busy in self.running))
        self.running = [busy for busy in self.running if busy.ends_s > self.now]


def best(load: Load, targets: Sequence[DrainTarget]) -> DrainTarget | None:
    """Return the target that would be least full with this session, by memory, so that each host gets its part; None if
    no host has room."""
    able = [target for target in targets if target.name not in load.refused and target.room_for(load)]
    return min(able, key=lambda target: (target.plus(load).fullness, -target.disk, target.name), default=None)
