"""Work in threads that the process does not wait for at its exit."""

from __future__ import annotations

import threading
import time

import pytest

from cmdop_migrate.util import threads


def test_several_at_a_time_and_in_order() -> None:
    """The first three can only end together; the results come as they were asked for."""
    together = threading.Barrier(3, timeout=10)

    def work(number: int) -> int:
        if number < 3:
            together.wait()
        time.sleep(0.02 * (number % 2 == 0))
        return number * number

    assert [one.result() for one in threads.each(work, range(8), 3, "w")] == [n * n for n in range(8)]


def test_no_more_than_were_allowed_and_none_for_who_has_left() -> None:
    lock, now, most, begun = threading.Lock(), [0], [0], []

    def work(number: int) -> int:
        with lock:
            begun.append(number)
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.005)
        with lock:
            now[0] -= 1
        return number

    taken = threads.each(work, iter(range(1000)), 4, "w")
    assert begun == []
    for number in range(10):
        assert next(taken).result() == number
    time.sleep(0.05)
    assert most[0] <= 4 and len(begun) <= 14


def test_what_fails_fails_where_it_is_taken() -> None:
    def work(number: int) -> int:
        if number == 1:
            raise KeyError(number)
        return number

    first, second, third = threads.each(work, range(3), 3, "w")
    assert (first.result(), third.result()) == (0, 2)
    with pytest.raises(KeyError):
        second.result()


def test_caller_can_stop_waiting_for_work_that_hangs() -> None:
    over = threading.Event()
    try:
        (only,) = threads.each(lambda _: over.wait(30), [1], 4, "w")
        with pytest.raises(TimeoutError):
            only.result(0.01)
    finally:
        over.set()
