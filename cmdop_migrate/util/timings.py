"""How long each named part of a flow took."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

TEST_STOP = "CMDOP_MIGRATE_TEST_STOP"


class Phases:
    """How long each named part of a flow took, in order.

    For tests only: with CMDOP_MIGRATE_TEST_STOP=FLOW:NAME in its environment the process stops itself (SIGSTOP) where
    that part begins, so that a test can kill, cut off or continue whatever it likes at that very point.
    """

    def __init__(self, flow: str) -> None:
        self.flow = flow
        self.seconds: dict[str, float] = {}

    def reach(self, name: str) -> None:
        """A point that has a name but takes no time of its own."""
        if os.environ.get(TEST_STOP) == f"{self.flow}:{name}":
            os.kill(os.getpid(), signal.SIGSTOP)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.reach(name)
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - began, 6)
