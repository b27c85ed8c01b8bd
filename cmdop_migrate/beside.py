"""Work in a thread that nobody has to wait for: the process may end before it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
