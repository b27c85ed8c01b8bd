"""Enforce the lease deadline of a restored session until its holder does.

Between CRIU's last step and the holder's confirmation that it has adopted the session, the holder may be stopped or
slow. Past the deadline another host may restore the session, so no process of this copy may run then. The restoring
command watches the time in a thread: CRIU and ptrace wait without a limit for processes that the holder's lease
watchdog has frozen, and only killing those ends such a wait.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from cmdop_migrate import clock, log
from cmdop_migrate.errors import TimedOut
from cmdop_migrate.holder import cgroup
from cmdop_migrate.session.spawn_holder import Starter

RESTORERS = "restorers"  # a cgroup beside that of the holders
_log = log.get("restore")


class AdoptionDeadline:
    """Watch the time until which the holder must have adopted the session of the cgroup `group`."""

    def __init__(self, name: str, group: str) -> None:
        self._name, self._group = name, group
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._resumed = False
        self.missed = False

    def begin(self, until: float, starter: Starter) -> None:
        """Start to watch, before the holder is asked to adopt the session. `until` is a time of CLOCK_BOOTTIME; a wait
        for the holder's answer ends then as well."""
        threading.Thread(target=self._watch, args=(until, starter), name="deadline", daemon=True).start()

    def _watch(self, until: float, starter: Starter) -> None:
        while (left := until - clock.boottime()) > 0:
            if self._over.wait(min(left, 1.0)):  # in steps, because the machine may be suspended meanwhile
                return
        with self._lock:
            if self._over.is_set():
                return
            if self._resumed:
                _log.warning("session %s: its holder is late: it is frozen until its lease is renewed", self._name)
                cgroup.order_freeze(self._group)
                return
            self.missed = True
            _log.warning("session %s: its lease ran out before its holder adopted it: it is ended", self._name)
            cgroup.kill(self._group)
            with contextlib.suppress(OSError):
                starter.control.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise TimedOut if the deadline has passed, and the copy was killed."""
        if self.missed:
            raise TimedOut(
                f"the lease of session {self._name!r} ran out before its holder had adopted it",
                "It is parked as before: restore it again.",
            )

    def resume(self) -> None:
        """Note that the holder is about to be told that the session runs. From here on the deadline freezes the session
        instead of ending it, as its holder would do; it resumes when the lease is renewed. Raises TimedOut as `check`
        does."""
        with self._lock:
            self.check()
            self._resumed = True

    def end(self) -> None:
        """Stop watching: the holder has the session, or the restore has failed."""
        with self._lock:
            self._over.set()

    def abandon(self, starter: Starter) -> None:
        """End the copy immediately, then its holder; a holder that is stopped is killed after a timeout.

        A holder that was told that the session runs is killed first. Otherwise it would record the end as the
        session's own exit; this way the record is corrected by the lease, which is parked again.
        """
        self.end()
        if self._resumed:
            starter.process.kill()
        cgroup.kill(self._group)
        starter.abandon()
        cgroup.remove(self._group)


def leave_caller_cgroup(group: str) -> None:
    """Move this process out of its caller's cgroup. The session of the cgroup `group` depends on this process from here
    on, so a service manager that ends all processes of a unit must not end it."""
    own = os.path.join(os.path.dirname(group), RESTORERS)
    with contextlib.suppress(OSError):
        cgroup.create(own)
        cgroup.join(own)
