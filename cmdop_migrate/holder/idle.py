"""Tell how long a session has been idle: no output, no input, no client that left, no processor time used.

Measured on CLOCK_MONOTONIC: neither a wall clock that jumps nor a suspended
machine makes a session idle.
"""

from __future__ import annotations

import time

from cmdop_migrate.holder import cgroup

BUSY = 0.01  # share of one processor: timers and idle loops of a quiet program use less
MEASURE_OVER = 1.0  # seconds at least: in a shorter time a single wake-up would count as work


class Idle:
    """Measure idleness. Call `touch` for each sign of life, and `look` now and then, for processor time used."""

    def __init__(self, group: str) -> None:
        self._group = group
        self.last = self._looked = time.monotonic()
        self._used = cgroup.cpu_seconds(group)

    def touch(self) -> None:
        """Note a sign of life."""
        self.last = time.monotonic()

    def look(self) -> None:
        """Check whether the processes have used processor time since the last look."""
        now = time.monotonic()
        if now - self._looked < MEASURE_OVER:
            return
        used = cgroup.cpu_seconds(self._group)
        if used - self._used > BUSY * (now - self._looked):
            self.last = now
        self._looked, self._used = now, used

    def pass_over(self) -> None:
        """Ignore the processor time used since the last look: CRIU used it for a dump, not the session."""
        self._looked, self._used = time.monotonic(), cgroup.cpu_seconds(self._group)

    def seconds(self) -> float:
        """Return the seconds since the last sign of life."""
        return max(0.0, time.monotonic() - self.last)
