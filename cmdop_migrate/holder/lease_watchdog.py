"""The dead-man switch: a session whose lease is not known to be fresh stands still.

The agent says "fresh until T" on CLOCK_BOOTTIME, which goes on counting while
the machine sleeps; a virtual machine that is paused counts nothing, and is found
out by the clock of its board. Past T the holder freezes the session by itself: no agent,
network or store need be there for that. Renewed, it goes on; superseded by
another incarnation, it is killed. Stdlib only: the holder loads this.
"""

from __future__ import annotations

import _thread
import os
import select
import time
from collections.abc import Callable

from cmdop_migrate.holder import cgroup, syscalls
from cmdop_migrate.util.vm_pause import Pauses

RECHECK_AFTER = 0.05


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseWatchdog:
    """One session's switch. `fileno` is to be polled; `on_timer` called when it is readable."""

    def __init__(self, group: str, until: float | None, on_change: Callable[[bool], None]) -> None:
        """`until` None: no lease is used. `on_change` hears True when it froze the session, False when it let it go."""
        self._group, self._until, self._on_change = group, until, on_change
        self._timer = syscalls.boottime_timer()
        self._lock = _thread.allocate_lock()
        self._pauses = Pauses()
        self._doubted = 0.0
        self._watched = False
        self.fenced = False
        if until is not None:
            self._arm(until)

    def fileno(self) -> int:
        return self._timer

    @property
    def until(self) -> float | None:
        return self._until

    def begin(self, until: float) -> None:
        """The time of a session that is about to run for the first time here."""
        if self._until is not None:
            self._arm(until)
            self._until = until
        self.watch()

    def watch(self) -> None:
        """From now on the time is kept even while the caller hangs: in a write to a dying disk, for example."""
        if not self._watched:
            self._watched = True
            _thread.start_new_thread(self._guard, ())

    def _guard(self) -> None:
        timer = select.poll()
        timer.register(self._timer, select.POLLIN)
        wait = None if self._pauses.every is None else self._pauses.every * 1000
        while True:
            came = timer.poll(wait)
            self._look_for_pause()
            with self._lock:  # so that nobody renews between the look and the order
                if self._until is not None and _now() >= self._until:
                    cgroup.order_freeze(self._group)
            if came:
                time.sleep(RECHECK_AFTER)

    def _look_for_pause(self) -> None:
        """Nobody knows how long it was, and a renewal that began before it says nothing. Who did not look himself hears
        of it by the timer."""
        with self._lock:
            if self._until is not None and self._pauses.look():
                cgroup.order_freeze(self._group)
                self._doubted = _now()
                self._until = min(self._until, self._doubted)
                self._arm(self._until)

    def on_timer(self) -> None:
        try:
            os.read(self._timer, 8)
        except BlockingIOError:
            pass
        self.check()

    def check(self) -> None:
        """Freezes if the time has come. Writing the order to freeze is all that is waited for."""
        if self._until is None or self.fenced:
            return
        self._look_for_pause()
        if _now() < self._until:
            return
        self.fenced = True
        cgroup.order_freeze(self._group)
        self._on_change(True)

    def may_run(self) -> bool:
        """To be asked before every thaw."""
        self.check()
        return not self.fenced

    def renewed(self, until: float, since: float) -> None:
        """The lease was renewed by a request that began at `since`, and nobody had taken over. An older word that
        comes late changes nothing; nor does one from before there was doubt."""
        self.check()  # past its time it was frozen, by us or for us: that must be known before it may go on
        with self._lock:
            if self._until is None or until <= self._until or since < self._doubted:
                return
            self._arm(until)
            self._until = until
            self._pauses.renewed()
        if self.fenced and _now() < until:
            self.fenced = False
            self._on_change(False)
            self.check()  # we may have been stopped ourselves, half-way

    def doubt(self) -> None:
        """Nobody knows whether the lease is still ours: stand still until a later look at it says so."""
        if self._until is None:
            return
        with self._lock:
            self._pauses.look(at_once=True)  # if that is why, it is seen to, and not found again after a renewal
            self._doubted = _now()
            self._until = min(self._until, self._doubted)
        self.check()

    def _arm(self, until: float) -> None:
        """Before a later time counts, and after an earlier one does: should we be stopped in between, whoever stands in
        for us goes by the timer, and must not be ahead of us (deadlines.py)."""
        syscalls.set_timer(self._timer, until)
