"""What a drain is asked for, and what it says while it works."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from cmdop_migrate.drain import capacity, schedule
from cmdop_migrate.drain.schedule import Budget, Load
from cmdop_migrate.errors import Usage
from cmdop_migrate.host.drain_journal import Entry

BANDWIDTH_LEAST = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """`hosts`: where to; none: all that are known. `deadline`: seconds from now; None: no limit. `park`: move
    nothing."""

    hosts: tuple[str, ...] = ()
    deadline: float | None = None
    park: bool = False
    parallel: int = 2
    bandwidth: int | None = None
    memory: int | None = None

    def check(self) -> None:
        if self.deadline is not None and self.deadline <= 0:
            raise Usage("--deadline 0 leaves no time for anything", "Give it some, for example --deadline 10m.")
        if not 1 <= self.parallel <= schedule.PARALLEL_MAX:
            raise Usage(f"--parallel {self.parallel} is out of range", f"Between 1 and {schedule.PARALLEL_MAX}.")
        if self.bandwidth is not None and self.bandwidth < BANDWIDTH_LEAST:
            raise Usage("--bandwidth is too little to send anything", "At least 1MiB, a second.")
        if self.park and self.hosts:
            raise Usage("--park moves nothing, --to says where", "Give one of the two.")

    @property
    def limit(self) -> float:
        return self.deadline if self.deadline is not None else math.inf

    def allows(self, load: Load) -> Load:
        return replace(load, stays="as asked") if self.park else load

    def budget(self) -> Budget:
        memory = self.memory if self.memory is not None else capacity.memory_here() // 2
        return Budget(self.parallel, self.bandwidth, memory)


@dataclass(frozen=True)
class Said:
    """Progress: what became of a session, or that it began (`going`); who is under way, how many wait."""

    entry: Entry
    seconds: float
    under_way: tuple[str, ...]
    waiting: int


Say = Callable[[Said], None]
