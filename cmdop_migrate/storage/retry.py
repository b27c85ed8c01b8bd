"""Retry: fulfil the same six obligations over another store that is sometimes unreachable.

Only StoreUnreachable is retried; a refusal stays one. Pauses double, with jitter so that many hosts do not retry in
step, and both the number of tries and the total time are bounded.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cmdop_migrate import log
from cmdop_migrate.clock import boottime
from cmdop_migrate.errors import StoreUnreachable
from cmdop_migrate.storage.base import Data, ObjectInfo, Store
from cmdop_migrate.storage.wrapper import StoreWrapper

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """Allow at most `tries` tries, none of them begun later than `total` seconds after the first.

    The pause after try n (from 1) is between half and all of `first` * 2^(n-1), never more than `longest`.
    """

    tries: int = 6
    total: float = 60.0
    first: float = 0.2
    longest: float = 5.0

    def pause(self, failed: int, chance: float) -> float:
        """Return the seconds to wait after `failed` failures; `chance` is uniform in [0, 1)."""
        full = min(self.longest, self.first * 2.0 ** (failed - 1))
        return full * (0.5 + chance / 2)


@dataclass(frozen=True)
class RetryClock:
    """Provide sleep, randomness and time; tests replace them."""

    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random
    now: Callable[[], float] = boottime


class RetryStore(StoreWrapper):
    """Retry StoreUnreachable within the policy. `link` is local, so it is not retried."""

    def __init__(self, inner: Store, policy: RetryPolicy | None = None, clock: RetryClock | None = None) -> None:
        super().__init__(inner)
        self._policy = policy or RetryPolicy()
        self._clock = clock or RetryClock()

    def put(self, name: str, data: Data) -> None:
        _Tries(self._policy, self._clock).until_done(lambda: self._inner.put(name, data))

    def put_new(self, name: str, data: Data) -> bool:
        tries = _Tries(self._policy, self._clock)

        def once() -> bool:
            if self._inner.put_new(name, data):
                return True
            # The object may be ours, stored by a try whose answer was lost. Without a failed try no request is added.
            return tries.failed > 0 and _holds(self._inner, name, data)

        return tries.until_done(once)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        return _Tries(self._policy, self._clock).until_done(lambda: self._inner.get(name, start, length))

    def stat(self, name: str) -> ObjectInfo | None:
        return _Tries(self._policy, self._clock).until_done(lambda: self._inner.stat(name))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Resume after the last name returned, by listing again: names come in order."""
        tries = _Tries(self._policy, self._clock)
        listing = tries.until_done(lambda: self._inner.list(prefix))
        return self._resumed(prefix, listing, tries)

    def few(self, prefix: str, most: int) -> Sequence[ObjectInfo] | None:
        return _Tries(self._policy, self._clock).until_done(lambda: self._inner.few(prefix, most))

    def delete(self, names: Iterable[str]) -> None:
        kept = tuple(names)
        _Tries(self._policy, self._clock).until_done(lambda: self._inner.delete(kept))

    def _resumed(self, prefix: str, listing: Iterator[ObjectInfo], tries: _Tries) -> Iterator[ObjectInfo]:
        last = ""
        while True:
            try:
                for info in listing:
                    if info.name > last:
                        last = info.name
                        yield info
                return
            except StoreUnreachable as error:
                tries.failed_once(error)
                listing = tries.until_done(lambda: self._inner.list(prefix))


class _Tries:
    """Count the tries of one operation."""

    def __init__(self, policy: RetryPolicy, clock: RetryClock) -> None:
        self._policy = policy
        self._clock = clock
        self._began = clock.now()
        self.failed = 0

    def until_done(self, act: Callable[[], T]) -> T:
        while True:
            try:
                return act()
            except StoreUnreachable as error:
                self.failed_once(error)

    def failed_once(self, error: StoreUnreachable) -> None:
        """Wait for the next try, or raise `error` if none is left."""
        self.failed += 1
        pause = self._policy.pause(self.failed, self._clock.chance())
        spent = self._clock.now() - self._began
        if self.failed >= self._policy.tries or spent + pause > self._policy.total:
            raise StoreUnreachable(f"{error.message} (gave up after {self.failed} tries)", error.hint) from error
        log.get("storage").info("try %d failed, again in %.1f s: %s", self.failed, pause, error.message)
        self._clock.sleep(pause)


def _holds(store: Store, name: str, data: Data) -> bool:
    try:
        return store.get(name) == data
    except KeyError:
        return False
