"""Freeze a session past its lease deadline when its holder, stopped or hanging, does not.

The agent knows the deadlines of the leases that it renewed. An agent that was started while the lease store is
unreachable has renewed none, and reads the deadline from the timer that the holder keeps in the kernel.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping

from cmdop_migrate import clock, log
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host.holder_order import HOLDERS
from cmdop_migrate.host.host import Host
from cmdop_migrate.lease.store import Held
from cmdop_migrate.model import Record
from cmdop_migrate.session import holder_deadlines

CHECK_EVERY = 0.05  # seconds
_log = log.get("agent")


class DeadlineWatchdog:
    """Check all sessions in a thread of its own: the agent's may be waiting for a lease store that does not answer."""

    def __init__(self, this_host: Host, sessions: Callable[[], Mapping[str, Record]], held: Mapping[str, Held]) -> None:
        """Watch the live `sessions`, which may be called from any thread. `held`: the agent puts a renewed lease there
        with `lock` held, and notifies its holder after that, so no session is frozen here that its holder has just
        thawed."""
        self.lock = threading.Lock()
        self._this_host, self._sessions, self._held = this_host, sessions, held
        self._deadlines: dict[str, float] = {}  # of the holders' timers, when they were last read
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deadline-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(CHECK_EVERY):
            try:
                for record in self._sessions().values():
                    self._check(record)
            except Exception:  # noqa: BLE001 - a supervising loop: a check that fails in one round may work in the next
                _log.error("checking the deadlines of holders failed", exc_info=True)

    def _check(self, record: Record) -> None:
        if self._is_renewed(record):
            return
        group = self._this_host.cgroup(record.session)
        if cgroup.is_to_freeze(group) or not cgroup.is_populated(group) or not self._has_expired(record):
            return
        with self.lock, contextlib.suppress(FileNotFoundError), cgroup.Grip(group) as grip:
            if not self._is_renewed(record) and self._has_expired(record) and is_current(self._this_host, record):
                grip.freeze()
                _log.warning(
                    "session %s: its lease deadline has passed and its holder did not freeze it: frozen", record.name
                )

    def _is_renewed(self, record: Record) -> bool:
        lease = self._held.get(record.session)
        return lease is not None and lease.token == record.token and clock.boottime() < lease.fresh_until

    def _has_expired(self, record: Record) -> bool:
        """Tell whether the deadline of the session's own holder has passed. When that holder runs again, it knows that
        the session is frozen, and thaws it with the next renewal."""
        if clock.boottime() >= self._deadlines.get(record.session, 0.0):
            self._deadlines = holder_deadlines.read(self._this_host.cgroup(HOLDERS))
        deadline = self._deadlines.get(record.session)
        return deadline is not None and clock.boottime() >= deadline


def is_current(this_host: Host, record: Record) -> bool:
    """Tell whether this very incarnation is the one on record, now."""
    now = this_host.load(record.session)
    return now is not None and now.phase == "live" and now.token == record.token
