"""Compute delays between attempts. Pure, except for the random spread."""

from __future__ import annotations

import random

FIRST, MOST, FACTOR = 0.05, 5.0, 2.0


class Backoff:
    """Return delays that grow with every failure, spread at random: a thousand peers that lost a relay together do not
    reconnect together."""

    def __init__(self, first: float = FIRST, most: float = MOST) -> None:
        self._first, self._most = first, most
        self._next = first
        self.failures = 0

    def failed(self) -> float:
        """Count a failure, and return the seconds to wait before the next attempt."""
        self.failures += 1
        now, self._next = self._next, min(self._most, self._next * FACTOR)
        return random.uniform(now / 2, now)

    def worked(self) -> None:
        """Start again with the shortest delay."""
        self._next = self._first
        self.failures = 0
