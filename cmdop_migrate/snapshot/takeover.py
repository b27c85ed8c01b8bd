"""Take over the lease of a session that is to be restored here from a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from cmdop_migrate import clock, log
from cmdop_migrate.errors import Fenced, Unreachable
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.leases import fenced
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.lease.record import LeaseRecord
from cmdop_migrate.lease.rules import Lost, Observation, Why
from cmdop_migrate.lease.store import Ended, Held, LeaseStore, Waiting
from cmdop_migrate.model import Record
from cmdop_migrate.storage.base import Store

_log = log.get("lease")


class TakeOver:
    """Hold the steps of taking over one lease.

    `look` refuses early what cannot work, and starts to observe a lease that is held; `take` acquires it, waiting up to
    `wait` seconds for a dead holder's lease to run out; `give_back` undoes that if the restore fails.
    """

    def __init__(
        self, leases: LeaseStore, images: Store, this_host: Host, record: Record, manifest: Manifest, wait: float
    ) -> None:
        self._leases, self._images, self._this_host = leases, images, this_host
        self._session, self._name, self._manifest = record.session, record.name, manifest
        self._until = clock.boottime() + wait
        self._observation: Observation | None = None
        self._marker: str | None = None

    def look(self) -> None:
        """Raise Fenced if the lease names another checkpoint, or another host holds it and waiting is not allowed."""
        seen = self._leases.inspect(self._session)
        if seen is None:
            return
        self._observation = seen.observation
        if seen.record.checkpoint != self._manifest.checkpoint:
            raise fenced(self._name, Lost(self._session, Why.CHECKPOINT, seen.record))
        if seen.record.state == "held" and not self._is_own(seen.record) and self._until <= clock.boottime():
            raise fenced(self._name, Lost(self._session, Why.HELD, seen.record))

    def _is_own(self, record: LeaseRecord) -> bool:
        """Tell whether this very host holds the lease, without running the session: a restore here was interrupted. The
        caller has the session's lock, so no process of that restore is alive."""
        return record.instance == self._this_host.instance()

    def take(self, report: Callable[[str], None]) -> Held:
        """Acquire the lease under a new fencing token. Raise Fenced if another host has the session. `report` receives
        a line each time this waits for a lease to run out."""
        config, session = self._this_host.config, self._session
        who = (session, config.host, self._this_host.instance(), config.lease_ttl)
        while True:
            seen = self._leases.inspect(session, self._observation)
            if seen is None:
                return self._take_unknown(who)
            expected = self._manifest.checkpoint
            if seen.record.state == "held" and self._is_own(seen.record):
                self._end_own(who, seen.record.token)
                continue  # now parked or ended; `acquire` distinguishes them
            observed = seen.observation
            answer = self._leases.acquire(
                *who, expect_checkpoint=expected, observation=observed, above=self._manifest.token
            )
            if isinstance(answer, Held):
                return answer
            if isinstance(answer, Lost) or clock.boottime() + answer.seconds > self._until:
                raise fenced(self._name, answer)
            self._observation = answer.observation
            report(f"{answer.holder.host} holds it; waiting {answer.seconds:.0f} s for its lease to run out")
            time.sleep(min(1.0, answer.seconds + 0.005))

    def _end_own(self, who: tuple[str, str, str, float], token: int) -> None:
        """End the lease that an interrupted restore on this host left. Its session may have run, so the next
        incarnation gets a fencing token of its own. A session that exited here, which the agent has not reported yet,
        is not restored."""
        answer: Held | Ended | Lost | Waiting = self._leases.acquire(
            *who, expect_checkpoint=self._manifest.checkpoint, resume_token=token
        )
        if isinstance(answer, Held):
            has_exited = self._has_exited(token)
            answer = (
                self._leases.release(answer) if has_exited else self._leases.park(answer, self._manifest.checkpoint)
            )
        if not isinstance(answer, Ended):
            raise fenced(self._name, answer)

    def _has_exited(self, token: int) -> bool:
        own = self._this_host.load(self._session)
        over = own is not None and own.phase == "exited" and own.exit is not None and own.exit.code is not None
        return over and own is not None and own.token == token

    def _take_unknown(self, who: tuple[str, str, str, float]) -> Held:
        """Acquire a lease that the lease store does not know: the lease store is new, or is not the one that the old
        host used. Then a marker in the images' store decides, once and for all, and only for a session that was
        parked."""
        if self._manifest.facts.get("live") or self._manifest.is_fork:
            raise Fenced(
                f"session {self._name!r} kept running after this checkpoint, and the lease store does not know it",
                "Use the lease store of the host it ran on, or restore a copy: --fork NAME",
            )
        own = self._this_host.host_id().encode()
        marker = f"restored/{self._manifest.checkpoint}"
        if not self._images.put_new(marker, own) and self._images.get(marker) != own:
            raise Fenced(
                f"checkpoint {self._manifest.checkpoint[:12]} was restored already, by a host with another lease store",
                "Hosts that share a store must share a lease store too. A copy: --fork NAME",
            )
        self._marker = marker
        answer = self._leases.acquire(*who, above=self._manifest.token)
        if not isinstance(answer, Held):
            raise fenced(self._name, answer)
        return answer

    def give_back(self, lease: Held) -> None:
        """Park the lease again, at the same checkpoint, after a failed restore. Its fencing token has grown, which does
        no harm."""
        try:
            if self._marker is not None:
                self._images.delete([self._marker])
            self._leases.park(lease, self._manifest.checkpoint)
        except Unreachable as error:
            # The lease stays with this host: its next restore resumes it; another host waits for it to run out.
            _log.warning("the lease of %s could not be parked again: %s", self._name, error.message)
