"""Limit how many bytes per second are sent to a store.

Uploads wait their turn: each object is sent when it and those before it would be through at that rate, so that at any
moment no more was sent than the rate allows, even of a single object. Nothing else waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cmdop_migrate.clock import boottime
from cmdop_migrate.storage.base import Data, Store
from cmdop_migrate.storage.wrapper import StoreWrapper


class RateLimiter:
    """Compute when each upload may start. Pure, except for the given clock."""

    def __init__(self, rate: int, now: Callable[[], float] = boottime) -> None:
        self._rate, self._now = rate, now
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait_for(self, size: int) -> float:
        """Count `size` bytes, and return the seconds from now until they may be sent."""
        with self._lock:
            now = self._now()
            self._free_at = max(now, self._free_at) + size / self._rate
            return self._free_at - now


class RateLimitedStore(StoreWrapper):
    """Delay `put` and `put_new` to keep to a rate in bytes per second."""

    def __init__(self, inner: Store, rate: int) -> None:
        super().__init__(inner)
        self._limiter = RateLimiter(rate)

    def put(self, name: str, data: Data) -> None:
        time.sleep(self._limiter.wait_for(len(data)))
        self._inner.put(name, data)

    def put_new(self, name: str, data: Data) -> bool:
        time.sleep(self._limiter.wait_for(len(data)))
        return self._inner.put_new(name, data)
