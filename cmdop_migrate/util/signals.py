"""A command that is told to stop finishes what is under way; told twice, it hurries."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """`times`: how often it was told."""

    def __init__(self) -> None:
        self.times = 0

    def told(self, _number: int, _frame: FrameType | None) -> None:
        self.times += 1


@contextmanager
def on_signals() -> Iterator[Stop]:
    """Until the end of the block these signals only count. In the main thread."""
    stop = Stop()
    before = [(number, signal.signal(number, stop.told)) for number in SIGNALS]
    try:
        yield stop
    finally:
        for number, handler in before:
            signal.signal(number, handler)
