"""Run work in daemon threads, which the process does not join at its exit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def start(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in a daemon thread, and return the future of its result."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def each(work: Callable[[S], T], items: Iterable[S], most: int, name: str) -> Iterator[Future[T]]:
    """Run `work` for each item, `most` at a time, and yield the futures in the order of the items. For requests to a
    remote store, which wait more than they compute. Work begins when the first future is taken, and no more begins
    after the caller stops iterating."""
    left, begun = iter(items), deque[Future[T]]()
    while True:
        begun.extend(start(partial(work, item), name) for item in islice(left, most - len(begun)))
        if not begun:
            return
        yield begun.popleft()
