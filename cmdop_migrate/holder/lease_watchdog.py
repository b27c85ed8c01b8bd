"""Freeze a session whose lease is not known to be held, without any other process's help.

The agent says "fresh until T" on CLOCK_BOOTTIME, which continues while the
machine is suspended. A virtual machine that is paused counts no time; its
real-time clock reveals that (`util/vm_pause.py`). Past T the holder freezes the
session by itself: neither agent nor network nor store is needed for that. When
the lease is renewed, the session resumes; when another incarnation has
superseded it, it is killed.
"""

from __future__ import annotations

import _thread
import os
import select
import time
from collections.abc import Callable

from cmdop_migrate.holder import cgroup, syscalls
from cmdop_migrate.util.vm_pause import Pauses

RECHECK_AFTER = 0.05  # seconds


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseWatchdog:
    """Watch one session's deadline. Poll `fileno`, and call `on_timer` when it is readable."""

    def __init__(self, group: str, until: float | None, on_change: Callable[[bool], None]) -> None:
        """Begin with the deadline `until`; None: no lease is used. Call `on_change` with True when the session was
        frozen, with False when it was released."""
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
        """Set the first deadline of a session that is about to run here."""
        if self._until is not None:
            self._arm(until)
            self._until = until
        self.watch()

    def watch(self) -> None:
        """Enforce the deadline from now on even while the caller hangs, in a write to a failing disk for example."""
        if not self._watched:
            self._watched = True
            _thread.start_new_thread(self._guard, ())

    def _guard(self) -> None:
        timer = select.poll()
        timer.register(self._timer, select.POLLIN)
        wait = None if self._pauses.every is None else self._pauses.every * 1000
        while True:
            fired = timer.poll(wait)
            self._look_for_pause()
            with self._lock:  # so that no renewal comes between the check and the order
                if self._until is not None and _now() >= self._until:
                    cgroup.order_freeze(self._group)
            if fired:
                time.sleep(RECHECK_AFTER)

    def _look_for_pause(self) -> None:
        """Freeze the session if the machine was paused: the length of the pause is unknown, and a renewal that began
        before it proves nothing. The timer tells the main thread, if that has not looked itself."""
        with self._lock:
            if self._until is not None and self._pauses.look():
                cgroup.order_freeze(self._group)
                self._doubted = _now()
                self._until = min(self._until, self._doubted)
                self._arm(self._until)

    def on_timer(self) -> None:
        """Check the deadline when the timer has fired."""
        try:
            os.read(self._timer, 8)
        except BlockingIOError:
            pass
        self.check()

    def check(self) -> None:
        """Freeze the session if the deadline has passed. This waits for no more than the write of the order to
        freeze."""
        if self._until is None or self.fenced:
            return
        self._look_for_pause()
        if _now() < self._until:
            return
        self.fenced = True
        cgroup.order_freeze(self._group)
        self._on_change(True)

    def may_run(self) -> bool:
        """Return whether the session may run. Ask before every thaw."""
        self.check()
        return not self.fenced

    def renewed(self, until: float, since: float) -> None:
        """Extend the deadline: a request that began at `since` renewed the lease, and no other host had taken it over.
        An older renewal that arrives late changes nothing, nor does one that began before there was doubt."""
        self.check()  # past its deadline it was frozen, by us or for us: that must be known before it may resume
        with self._lock:
            if self._until is None or until <= self._until or since < self._doubted:
                return
            self._arm(until)
            self._until = until
            self._pauses.renewed()
        if self.fenced and _now() < until:
            self.fenced = False
            self._on_change(False)
            self.check()  # this process may have been stopped in between

    def doubt(self) -> None:
        """Freeze the session until a later renewal: it is unknown whether this host still holds the lease."""
        if self._until is None:
            return
        with self._lock:
            self._pauses.look(at_once=True)  # a pause that is the cause of the doubt is not found again after a renewal
            self._doubted = _now()
            self._until = min(self._until, self._doubted)
        self.check()

    def _arm(self, until: float) -> None:
        """Set the timer: before a later deadline is in force, and after an earlier one is. If this process is stopped
        in between, the agent acts in its place by the timer, and must not be ahead of us
        (`session/holder_deadlines.py`)."""
        syscalls.set_timer(self._timer, until)
