"""The lease store as the relay asks it: off the event loop, with an end to every wait. Silence is an answer too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cmdop_migrate import clock, log
from cmdop_migrate.errors import LeaseUnreachable, Unreachable
from cmdop_migrate.lease.store import LeaseStore
from cmdop_migrate.relay.credential_registry import Issue, Issued
from cmdop_migrate.relay.router.router_events import Answer, Standing
from cmdop_migrate.util.metrics import Metrics

THREADS = 16
WAIT = 5.0
_log = log.get("relay")
T = TypeVar("T")


class Truth:
    """`silent_since`: when the store stopped answering, on CLOCK_BOOTTIME; None while it answers."""

    def __init__(self, leases: LeaseStore, issued: Issued, metrics: Metrics, wait: float = WAIT) -> None:
        self._leases, self._issued, self._metrics, self._wait = leases, issued, metrics, wait
        self._pool = ThreadPoolExecutor(THREADS, "lease")
        self.silent_since: float | None = None

    async def standing(self, session: str, named: bool) -> Answer:
        """What is so of a session at some moment after this was called."""
        try:
            return await self._call(lambda: self._standing(session, named))
        except Unreachable:
            return "silent"

    async def issue(self, ident: str) -> Issue | None:
        """LeaseUnreachable and LeaseUnreadable, when it is not known."""
        return await self._call(lambda: self._issued.find(ident))

    async def keep_name(self, session: str, name: str) -> bool:
        try:
            await self._call(lambda: self._issued.keep_name(session, name))
        except Unreachable:
            return False
        return True

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _standing(self, session: str, named: bool) -> Answer:
        # The name is asked for whether or not there is a lease: both take the same time.
        name = self._issued.name_of(session) if named else None
        seen = self._leases.inspect(session)
        if seen is None:
            return "unknown"
        record = seen.record
        over = record.state == "free" and record.checkpoint is None
        return Standing(record.token, record.state, record.host, record.ttl, over, name)

    async def _call(self, function: Callable[[], T]) -> T:
        self._metrics.add("asked_total")
        future = asyncio.get_running_loop().run_in_executor(self._pool, function)
        try:
            answer = await asyncio.wait_for(future, self._wait)
        except TimeoutError as error:
            raise self._silent(LeaseUnreachable(f"no answer within {self._wait:g} s", "Check the store.")) from error
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
