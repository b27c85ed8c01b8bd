"""Look up leases and credentials for the relay: in threads, off the event loop, with a timeout for every question."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cmdop_migrate import clock, log
from cmdop_migrate.errors import LeaseUnreachable, Unreachable
from cmdop_migrate.lease.store import LeaseStore
from cmdop_migrate.relay.credential_registry import CredentialRegistry, IssuedCredential
from cmdop_migrate.relay.router.router_events import Answer, LeaseStatus
from cmdop_migrate.util.metrics import Metrics

THREADS = 16
ANSWER_TIMEOUT = 5.0
_log = log.get("relay")
T = TypeVar("T")


class LeaseLookup:
    """Ask the lease store. `silent_since`: when it stopped answering, on CLOCK_BOOTTIME; None while it
    answers."""

    def __init__(
        self, leases: LeaseStore, registry: CredentialRegistry, metrics: Metrics, timeout: float = ANSWER_TIMEOUT
    ) -> None:
        self._leases, self._registry, self._metrics, self._timeout = leases, registry, metrics, timeout
        self._pool = ThreadPoolExecutor(THREADS, "lease")
        self.silent_since: float | None = None

    async def lease(self, session: str, named: bool) -> Answer:
        """Return the state of a session's lease at some moment after the call; with `named`, also the session's
        name."""
        try:
            return await self._call(lambda: self._read_lease(session, named))
        except Unreachable:
            return "silent"

    async def credential(self, ident: str) -> IssuedCredential | None:
        """Return a credential, or None if it is not listed. Raise LeaseUnreachable or LeaseUnreadable."""
        return await self._call(lambda: self._registry.find(ident))

    async def keep_name(self, session: str, name: str) -> bool:
        """Keep a session's name in the store, and return whether that succeeded."""
        try:
            await self._call(lambda: self._registry.keep_name(session, name))
        except Unreachable:
            return False
        return True

    def close(self) -> None:
        """End the threads. Questions that wait for one are cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read_lease(self, session: str, named: bool) -> Answer:
        # The name is read whether or not there is a lease, so that both cases take the same time.
        name = self._registry.name_of(session) if named else None
        seen = self._leases.inspect(session)
        if seen is None:
            return "unknown"
        record = seen.record
        over = record.state == "free" and record.checkpoint is None
        return LeaseStatus(record.token, record.state, record.host, record.ttl, over, name)

    async def _call(self, function: Callable[[], T]) -> T:
        self._metrics.add("asked_total")
        future = asyncio.get_running_loop().run_in_executor(self._pool, function)
        try:
            answer = await asyncio.wait_for(future, self._timeout)
        except TimeoutError as error:
            raise self._silent(LeaseUnreachable(f"no answer within {self._timeout:g} s", "Check the store.")) from error
        except Unreachable as error:
            raise self._silent(error) from error
        if self.silent_since is not None:
            _log.warning("the lease store answers again")
            self.silent_since = None
        return answer

    def _silent(self, error: Unreachable) -> Unreachable:
        self._metrics.add("silent_total")
        if self.silent_since is None:
            _log.warning("the lease store does not answer: %s", error.message)
            self.silent_since = clock.boottime()
        return error
