"""The dead-man switch: a session whose lease is not known to be fresh stands still.

The agent says "fresh until T" on CLOCK_BOOTTIME, which goes on counting while
the machine sleeps. Past T the holder freezes the session by itself: no agent,
network or store need be there for that. Renewed, it goes on; superseded by
another incarnation, it is killed. Stdlib only: the holder loads this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from cmdop_migrate.session import cgroup, syscalls


class DeadMan:
    """One session's switch. `fileno` is to be polled; `on_timer` called when it is readable."""

    def __init__(self, group: str, until: float | None, on_change: Callable[[bool], None]) -> None:
        """`until` None: no lease is used. `on_change` hears True when it froze the session, False when it let it go."""
        self._group, self._until, self._on_change = group, until, on_change
        self._timer = syscalls.boottime_timer()
        self.fenced = False
        self._arm()

    def fileno(self) -> int:
        return self._timer

    @property
    def until(self) -> float | None:
        return self._until

    def on_timer(self) -> None:
        try:
            os.read(self._timer, 8)
        except BlockingIOError:
            pass
        self.check()

    def check(self) -> None:
        """Freezes if the time has come. Writing the order to freeze is all that is waited for."""
        if self._until is None or self.fenced or time.clock_gettime(time.CLOCK_BOOTTIME) < self._until:
            return
        self.fenced = True
        cgroup.order_freeze(self._group)
        self._on_change(True)

    def renewed(self, until: float) -> None:
        """The lease was renewed, and nobody took over. An older word that comes late changes nothing."""
        if self._until is None or until <= self._until:
            return
        self._until = until
        self._arm()
        if self.fenced and time.clock_gettime(time.CLOCK_BOOTTIME) < until:
            self.fenced = False
            self._on_change(False)

    def doubt(self) -> None:
        """Nobody knows whether the lease is still ours: stand still until it is known."""
        self._until = min(self._until or 0.0, time.clock_gettime(time.CLOCK_BOOTTIME))
        self.check()

    def _arm(self) -> None:
        if self._until is not None:
            syscalls.set_timer(self._timer, self._until)
