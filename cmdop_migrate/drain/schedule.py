"""Who goes where, in which order, several at once, before a deadline. Pure.

Cheap ones first: when time runs out, as many as possible are gone. If not all can
be moved in time, the dearest are parked instead, which takes less; what no target
has room for is parked too. What could not even begin before the deadline is left.

Within the budget: at most `parallel` at once and PER_TARGET to one host; their
memory together at most `memory`, except that one which is larger goes alone. Each
gets an equal share of the bandwidth, so that all together never take more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

PARALLEL_MAX = 4
PER_TARGET = 4  # calls at once to one host: its sshd takes 10, and others want in too
SPARE = 64 << 20  # bytes of memory and disk that a target keeps
PARK_FIXED, MOVE_FIXED = 1.0, 3.0  # seconds: commands start, hosts are asked
RATE = 100 << 20  # bytes of memory a second, where nothing was measured
RATIO = 4  # about what compression makes of memory
How = Literal["move", "park", "leave"]


@dataclass(frozen=True)
class Load:
    """One session. `memory`, `files`: its bytes; `send`: those the store does not have yet, about; `work_s`: seconds to
    dump and upload them, without a limit to the bandwidth. `refused`: targets that it could not go to; `tried`: moves
    of it that failed; `stays`: why it is not to be moved at all."""

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
class Target:
    """A host that takes sessions, the bytes it had to spare, and those of what goes there."""

    name: str
    memory: int
    disk: int
    takes_memory: int = 0
    takes_disk: int = 0
    takes: int = 0

    def room_for(self, load: Load) -> bool:
        return (
            self.memory >= self.takes_memory + load.memory + SPARE
            and self.disk >= self.takes_disk + needed_disk(load) + SPARE
        )

    def plus(self, load: Load, sign: int = 1) -> Target:
        """With this one besides; `sign` -1: without it."""
        return replace(
            self,
            takes_memory=self.takes_memory + sign * load.memory,
            takes_disk=self.takes_disk + sign * needed_disk(load),
            takes=self.takes + sign,
        )

    @property
    def fullness(self) -> float:
        """What goes there as a part of what it had. Small ones count for something too."""
        return (self.takes_memory + self.takes * SPARE) / max(1, self.memory)


@dataclass(frozen=True)
class Budget:
    """`bandwidth`: bytes a second to the store, all together; None: no limit. `memory`: bytes of the sessions under
    way. `pace`: how many times longer than guessed it takes on this host, as far as seen."""

    parallel: int = 2
    bandwidth: int | None = None
    memory: int | None = None
    pace: float = 1.0

    @property
    def share(self) -> int | None:
        """Of the bandwidth, for each of those under way."""
        return max(1, self.bandwidth // self.parallel) if self.bandwidth is not None else None


@dataclass(frozen=True)
class Busy:
    """One that is under way: for how many seconds yet, about."""

    memory: int
    ends_s: float
    target: str | None = None


@dataclass(frozen=True)
class Planned:
    """`begin_s`, `end_s`: seconds from now. `why`: a reason for anything but a move."""

    load: Load
    how: How
    begin_s: float
    end_s: float
    target: str | None = None
    why: str = ""


def needed_disk(load: Load) -> int:
    return load.memory // RATIO + load.files


def proof_deadline(one: Planned, planned: Sequence[Planned], left: float) -> float:
    """Return the seconds from now within which the park of `one` must be done: its own time, and its share of what
    the whole plan leaves until the deadline. Nothing is left while some session cannot go in time."""
    if any(other.how == "leave" for other in planned):
        return one.end_s
    spare = max(0.0, left - max(other.end_s for other in planned))
    return one.end_s + spare / max(1, sum(other.how == "park" for other in planned))


def park_seconds(load: Load, budget: Budget) -> float:
    sending = load.send / budget.share if budget.share is not None else 0.0
    return budget.pace * (PARK_FIXED + max(load.work_s, sending))


def move_seconds(load: Load, budget: Budget) -> float:
    return park_seconds(load, budget) + budget.pace * (MOVE_FIXED + needed_disk(load) / RATE)


def schedule(
    loads: Sequence[Load],
    targets: Sequence[Target],
    budget: Budget,
    time_s: float = math.inf,
    busy: Sequence[Busy] = (),
) -> list[Planned]:
    """One for each load, in the order in which they begin. `busy`: what is under way already, and counts; `targets`:
    what they have left besides."""
    ordered = sorted(loads, key=lambda one: (move_seconds(one, budget), one.session))
    movable = [one for one in ordered if not one.stays]
    parked: dict[str, str] = {}
    while True:
        found = _Simulation(targets, budget, time_s, busy, parked).run(ordered)
        moved = {one.load.session for one in found if one.how == "move"}
        late = [one for one in found if one.how == "leave" or one.end_s > time_s]
        dearest = next((one for one in reversed(movable) if one.session in moved), None)
        if not late or dearest is None:
            return found
        parked[dearest.session] = "no time to move it"


@dataclass
class _Simulation:
    targets: Sequence[Target]
    budget: Budget
    time_s: float
    busy: Sequence[Busy]
    parked: dict[str, str]
    now: float = 0.0
    running: list[Busy] = field(default_factory=list)

    def run(self, loads: Sequence[Load]) -> list[Planned]:
        self.running = list(self.busy)
        room = {one.name: one for one in self.targets}
        return [self._place(one, room) for one in sorted(loads, key=self._seconds)]

    def _seconds(self, load: Load) -> tuple[float, str]:
        parks = bool(load.stays or load.session in self.parked)
        return (park_seconds if parks else move_seconds)(load, self.budget), load.session

    def _place(self, load: Load, room: dict[str, Target]) -> Planned:
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
        most = self.budget.memory
        return (
            len(self.running) < self.budget.parallel
            and (most is None or sum(one.memory for one in self.running) + load.memory <= most)
            and (target is None or sum(one.target == target for one in self.running) < PER_TARGET)
        )

    def _until_next_end(self) -> None:
        self.now = max(self.now, min(one.ends_s for one in self.running))
        self.running = [one for one in self.running if one.ends_s > self.now]


def best(load: Load, targets: Sequence[Target]) -> Target | None:
    """The one that would be least full with it, by memory: each gets its part."""
    able = [one for one in targets if one.name not in load.refused and one.room_for(load)]
    return min(able, key=lambda one: (one.plus(load).fullness, -one.disk, one.name), default=None)
