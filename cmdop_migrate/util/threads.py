"""Work in a thread that nobody has to wait for: the process may end before it."""

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
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - a thread's end: whoever asks for the result is told
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def each(work: Callable[[S], T], items: Iterable[S], most: int, name: str) -> Iterator[Future[T]]:
    """`work` of each item, in their order, `most` at a time: what is asked of a store far away waits more than it
    works. None is begun before somebody takes the first, nor after they have left."""
    left, begun = iter(items), deque[Future[T]]()
    while True:
        begun.extend(start(partial(work, one), name) for one in islice(left, most - len(begun)))
        if not begun:
            return
        yield begun.popleft()
