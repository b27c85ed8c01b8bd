"""Count the requests that go through a store.

Below RetryStore the wrapper counts every try, above it every call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cmdop_migrate.clock import boottime
from cmdop_migrate.errors import CmdopError
from cmdop_migrate.storage.base import Data, ObjectInfo, Store
from cmdop_migrate.storage.wrapper import StoreWrapper


@dataclass(frozen=True)
class Count:
    """Count one kind of request. `seconds` adds up over threads, so it may exceed the elapsed time."""

    requests: int = 0
    failed: int = 0
    sent: int = 0
    received: int = 0
    seconds: float = 0.0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.requests + other.requests,
            self.failed + other.failed,
            self.sent + other.sent,
            self.received + other.received,
            self.seconds + other.seconds,
        )


class MeterStore(StoreWrapper):
    """Count requests by kind, the name of the method. A missing object or a lost `put_new` is not a failure."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._counts: dict[str, Count] = {}

    def counts(self) -> Mapping[str, Count]:
        """Return the counts so far, by kind."""
        with self._lock:
            return dict(self._counts)

    def total(self) -> Count:
        return sum(self.counts().values(), Count())

    def put(self, name: str, data: Data) -> None:
        with self._timed("put", len(data)):
            super().put(name, data)

    def put_new(self, name: str, data: Data) -> bool:
        with self._timed("put_new", len(data)):
            return super().put_new(name, data)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        with self._timed("get"):
            data = super().get(name, start, length)
        self._add("get", Count(received=len(data)))
        return data

    def stat(self, name: str) -> ObjectInfo | None:
        with self._timed("stat"):
            return super().stat(name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._timed("list"):
            return super().list(prefix)

    def few(self, prefix: str, most: int) -> Sequence[ObjectInfo] | None:
        with self._timed("list"):
            return super().few(prefix, most)

    def delete(self, names: Iterable[str]) -> None:
        with self._timed("delete"):
            super().delete(names)

    def _add(self, kind: str, more: Count) -> None:
        with self._lock:
            self._counts[kind] = self._counts.get(kind, Count()) + more

    @contextlib.contextmanager
    def _timed(self, kind: str, sent: int = 0) -> Iterator[None]:
        began, failed = boottime(), 0
        try:
            yield
        except CmdopError:
            failed = 1
            raise
        finally:
            self._add(kind, Count(requests=1, failed=failed, sent=sent, seconds=boottime() - began))
