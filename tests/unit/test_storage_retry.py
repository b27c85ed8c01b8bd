"""Test retry and metering, with given time and randomness."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.errors import StoreDenied, StoreUnreachable, Usage
from cmdop_migrate.storage.base import Data, ObjectInfo, Store
from cmdop_migrate.storage.memory import MemoryStore
from cmdop_migrate.storage.retry import RetryClock, RetryPolicy, RetryStore
from tests.support.meter_store import Count, MeterStore


class Clock:
    """Advance time only by sleeping."""

    def __init__(self) -> None:
        self.time = 100.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds

    def outside(self, chance: float = 0.0) -> RetryClock:
        return RetryClock(self.sleep, lambda: chance, lambda: self.time)


class Flaky(MemoryStore):
    """Fail the next `away` calls. With `after` execute the call first, so that only the answer is lost."""

    def __init__(self, away: int = 0, after: bool = False, error: type[Exception] = StoreUnreachable) -> None:
        super().__init__()
        self.away, self.after, self.error, self.calls = away, after, error, 0

    def _fail(self) -> None:
        self.calls += 1
        if self.away > 0:
            self.away -= 1
            raise self.error("away", "wait")

    def put(self, name: str, data: Data) -> None:
        if self.after:
            super().put(name, data)
        self._fail()
        super().put(name, data)

    def put_new(self, name: str, data: Data) -> bool:
        if self.after and self.away:
            super().put_new(name, data)
        self._fail()
        return super().put_new(name, data)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        self._fail()
        return super().get(name, start, length)

    def stat(self, name: str) -> ObjectInfo | None:
        self._fail()
        return super().stat(name)

    def delete(self, names: Iterable[str]) -> None:
        self._fail()
        super().delete(names)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Fail part-way, each time a little later."""
        self.calls += 1
        for number, info in enumerate(super().list(prefix)):
            if number == 2 + self.calls and self.away:
                self.away -= 1
                raise self.error("away", "wait")
            yield info


ACTS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("a", b"2"),
    "put_new": lambda store: store.put_new("b", b"2"),
    "get": lambda store: store.get("a"),
    "stat": lambda store: store.stat("a"),
    "delete": lambda store: store.delete(name for name in ["a"]),
}


def filled(inner: Flaky) -> Flaky:
    MemoryStore.put(inner, "a", b"1")
    return inner


@pytest.mark.parametrize("act", ACTS)
def test_retry_until_the_store_answers(act: str) -> None:
    steady, inner, clock = filled(Flaky()), filled(Flaky(away=3)), Clock()
    assert ACTS[act](RetryStore(inner, RetryPolicy(), clock.outside())) == ACTS[act](steady) or act == "stat"
    assert inner.calls == 4
    assert [i.name for i in MemoryStore.list(inner)] == [i.name for i in MemoryStore.list(steady)]
    assert clock.pauses == pytest.approx([0.1, 0.2, 0.4])


@pytest.mark.parametrize("act", ACTS)
def test_retry_gives_up_after_the_last_try_and_keeps_the_hint(act: str) -> None:
    inner, clock = filled(Flaky(away=99)), Clock()
    with pytest.raises(StoreUnreachable, match=r"away \(gave up after 4 tries\)") as caught:
        ACTS[act](RetryStore(inner, RetryPolicy(tries=4), clock.outside()))
    assert inner.calls == 4 and caught.value.hint == "wait"


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("error", [StoreDenied, Usage, KeyError])
def test_only_store_unreachable_is_retried(act: str, error: type[Exception]) -> None:
    inner, clock = filled(Flaky(away=1, error=error)), Clock()
    with pytest.raises(error):
        ACTS[act](RetryStore(inner, RetryPolicy(), clock.outside()))
    assert inner.calls == 1 and clock.pauses == []


def test_retry_gives_up_in_time() -> None:
    inner, clock = Flaky(away=99), Clock()
    with pytest.raises(StoreUnreachable):
        RetryStore(inner, RetryPolicy(tries=99, total=10.0), clock.outside()).stat("a")
    assert clock.time - 100.0 <= 10.0 and inner.calls > 5


@given(st.integers(1, 40), st.floats(0, 1, exclude_max=True))
def test_retry_pause_grows_within_bounds(failed: int, chance: float) -> None:
    policy = RetryPolicy()
    pause = policy.pause(failed, chance)
    assert policy.first / 2 <= pause <= policy.longest
    assert pause <= policy.pause(failed + 1, chance)


def test_put_new_recognises_its_object_after_a_lost_answer() -> None:
    inner, clock = Flaky(away=1, after=True), Clock()
    assert RetryStore(inner, RetryPolicy(), clock.outside()).put_new("a", b"ours") is True


def test_put_new_that_lost_returns_false() -> None:
    inner, clock = filled(Flaky(away=1)), Clock()
    assert RetryStore(inner, RetryPolicy(), clock.outside()).put_new("a", b"ours") is False
    assert MemoryStore.get(inner, "a") == b"1"


def test_put_new_without_a_failed_try_does_not_compare_content() -> None:
    inner = filled(Flaky())
    assert RetryStore(inner).put_new("a", b"1") is False


def test_listing_resumes_after_a_failure() -> None:
    inner, clock = Flaky(away=4), Clock()
    names = [f"n/{number}" for number in range(9)]
    for name in names:
        MemoryStore.put(inner, name, b"")
    assert [info.name for info in RetryStore(inner, RetryPolicy(), clock.outside()).list("n/")] == names
    assert inner.calls == 5 and len(clock.pauses) == 4
    inner.away, inner.calls = 99, 0
    with pytest.raises(StoreUnreachable, match="gave up"):
        list(RetryStore(inner, RetryPolicy(tries=2), clock.outside()).list("n/"))


def test_meter_counts_by_kind() -> None:
    inner = Flaky(away=1)
    meter = MeterStore(inner)
    store = RetryStore(meter, RetryPolicy(), Clock().outside())
    store.put("a", b"12345")
    assert store.put_new("a", b"1") is False
    assert store.get("a", 1, 2) == b"23"
    with pytest.raises(KeyError):
        store.get("b")
    store.stat("a")
    assert len(list(store.list())) == 1
    store.delete(["a"])
    got = {kind: (c.requests, c.failed, c.sent, c.received) for kind, c in meter.counts().items()}
    assert got == {
        "put": (2, 1, 10, 0),
        "put_new": (1, 0, 1, 0),
        "get": (2, 0, 0, 2),
        "stat": (1, 0, 0, 0),
        "list": (1, 0, 0, 0),
        "delete": (1, 0, 0, 0),
    }
    total = meter.total()
    assert (total.requests, total.failed, total.sent, total.received) == (8, 1, 11, 2)
    assert total.seconds >= 0 and Count() + total == total
