"""Test the upload rate limit."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.storage.memory import MemoryStore
from cmdop_migrate.storage.rate_limit import RateLimitedStore, RateLimiter


@given(st.integers(1, 1000), st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 10)), min_size=1))
def test_rate_limit_is_never_exceeded(rate: int, sends: list[tuple[int, float]]) -> None:
    now = 0.0
    turns = RateLimiter(rate, lambda: now)
    gone: list[tuple[float, int]] = []
    for size, pause in sends:
        now += pause
        gone.append((now + turns.wait_for(size), size))
    for index, (moment, _) in enumerate(gone):
        assert sum(size for _, size in gone[: index + 1]) <= rate * moment + 1e-6 * rate
    moments = [moment for moment, _ in gone]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(moments))  # but for rounding


def test_rate_limited_store_stores_objects() -> None:
    store = RateLimitedStore(MemoryStore(), 1 << 30)
    store.put("a", b"1")
    assert store.put_new("b", b"22") and not store.put_new("b", b"3")
    assert (store.get("a"), store.get("b", 1, 1)) == (b"1", b"2")
    assert [(one.name, one.size) for one in store.list()] == [("a", 1), ("b", 2)]
    store.delete(["a"])
    assert store.stat("a") is None
