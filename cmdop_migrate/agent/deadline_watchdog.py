"""The agent in the place of a holder that is stopped, or hangs: past its time a session stands still all the same.

Until when it may run the agent knows of the leases that it renewed. One that was started while the lease store is away
has renewed none, and asks the kernel for the time that the holder keeps.
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

LOOK_EVERY = 0.05
_log = log.get("agent")


class StandIn:
    """A thread of its own: the agent's may be waiting for a lease store that does not answer."""

    def __init__(self, this_host: Host, sessions: Callable[[], Mapping[str, Record]], held: Mapping[str, Held]) -> None:
        """`sessions`: those that live here, from any thread. `held`: what is renewed is put there with `lock` held, and
        its holder told after that: so nothing is frozen here that its holder has just let go on."""
        self.lock = threading.Lock()
        self._this_host, self._sessions, self._held = this_host, sessions, held
        self._until: dict[str, float] = {}  # by the holders' timers, when they were last looked at
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stand-in", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY):
            try:
                for record in self._sessions().values():
                    self._look(record)
            except Exception:  # noqa: BLE001 - a supervising loop: what fails in one round may work in the next
                _log.error("a look at the holders failed", exc_info=True)

    def _look(self, record: Record) -> None:
        if self._is_renewed(record):
            return
        group = self._this_host.cgroup(record.session)
        if cgroup.is_to_freeze(group) or not cgroup.is_populated(group) or not self._is_over(record):
            return
        with self.lock, contextlib.suppress(FileNotFoundError), cgroup.Grip(group) as grip:
            if not self._is_renewed(record) and self._is_over(record) and is_still(self._this_host, record):
                grip.freeze()
                _log.warning("session %s: its time is over, and its holder does nothing: frozen", record.name)

    def _is_renewed(self, record: Record) -> bool:
        lease = self._held.get(record.session)
        return lease is not None and lease.token == record.token and clock.boottime() < lease.fresh_until

    def _is_over(self, record: Record) -> bool:
        """By its holder's own time: as soon as that comes to itself, it knows that the session stands still, and lets
        it go on with the next renewal."""
        if clock.boottime() >= self._until.get(record.session, 0.0):
            self._until = holder_deadlines.read(self._this_host.cgroup(HOLDERS))
        until = self._until.get(record.session)
        return until is not None and clock.boottime() >= until


def is_still(this_host: Host, record: Record) -> bool:
    """That this very incarnation is the one on record, now."""
    now = this_host.load(record.session)
    return now is not None and now.phase == "live" and now.token == record.token
