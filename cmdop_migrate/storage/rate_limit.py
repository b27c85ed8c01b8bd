"""A store to which no more than so many bytes a second are sent.

What is sent waits its turn: each object goes when it and those before it would be through at that rate, so that by any
moment no more was sent than the rate allows, even of a single object. Nothing else waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cmdop_migrate.clock import boottime
from cmdop_migrate.storage.base import Data, Store
from cmdop_migrate.storage.wrapper import ThroughStore


class Turns:
    """When each may go. Pure, but for the clock given."""

    def __init__(self, rate: int, now: Callable[[], float] = boottime) -> None:
        self._rate, self._now = rate, now
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait_for(self, size: int) -> float:
        """Seconds from now until that many bytes may go; they are counted."""
        with self._lock:
            now = self._now()
            self._free_at = max(now, self._free_at) + size / self._rate
            return self._free_at - now


class LimitStore(ThroughStore):
    def __init__(self, inner: Store, rate: int) -> None:
        super().__init__(inner)
        self._turns = Turns(rate)

    def put(self, name: str, data: Data) -> None:
        time.sleep(self._turns.wait_for(len(data)))
        self._inner.put(name, data)

    def put_new(self, name: str, data: Data) -> bool:
        time.sleep(self._turns.wait_for(len(data)))
        return self._inner.put_new(name, data)
