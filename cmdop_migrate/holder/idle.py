"""Since when nothing happens in a session: no output, no input, no client that left, no work done.

On CLOCK_MONOTONIC: a wall clock that jumps makes nobody idle, nor does a
machine that sleeps. Stdlib only: the holder loads this.
"""

from __future__ import annotations

import time

from cmdop_migrate.holder import cgroup

BUSY = 0.01  # of one processor: what timers and idle loops of a quiet program stay below
LOOK_EVERY = 1.0  # seconds; over less, a single wake-up would count


class Idle:
    """`touch` on every sign of life; `look` now and then, for work nobody sees."""

    def __init__(self, group: str) -> None:
        self._group = group
        self.last = self._looked = time.monotonic()
        self._used = cgroup.cpu_seconds(group)

    def touch(self) -> None:
        self.last = time.monotonic()

    def look(self) -> None:
        """Whether its processes have worked since the last look."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY:
            return
        used = cgroup.cpu_seconds(self._group)
        if used - self._used > BUSY * (now - self._looked):
            self.last = now
        self._looked, self._used = now, used

    def pass_over(self) -> None:
        """What was used since the last look was not the session's own doing: it was dumped."""
        self._looked, self._used = time.monotonic(), cgroup.cpu_seconds(self._group)

    def seconds(self) -> float:
        return max(0.0, time.monotonic() - self.last)
