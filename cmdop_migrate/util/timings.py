"""Measure how long each named part of a flow takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from cmdop_migrate.util import faults


class Phases:
    """Measure the named parts of one flow, in order. The beginning of each part is a fault point for tests."""

    def __init__(self, flow: str) -> None:
        self.flow = flow
        self.seconds: dict[str, float] = {}

    def reach(self, name: str) -> None:
        """Mark a point that takes no time of its own: only a fault point."""
        faults.point(self.flow, name)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as the part `name`; several blocks of one name add up."""
        self.reach(name)
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - began, 6)
