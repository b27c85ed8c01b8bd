"""Count the signals that ask a command to stop: it finishes what is in progress, and hurries at the second one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Count in `times` how often the command was asked to stop."""

    def __init__(self) -> None:
        self.times = 0

    def count(self, _number: int, _frame: FrameType | None) -> None:
        self.times += 1


@contextmanager
def on_signals() -> Iterator[Stop]:
    """Count these signals, and do nothing else, during the block. Call this in the main thread."""
    stop = Stop()
    before = [(number, signal.signal(number, stop.count)) for number in SIGNALS]
    try:
        yield stop
    finally:
        for number, handler in before:
            signal.signal(number, handler)
