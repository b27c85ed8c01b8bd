"""How long to wait before the next try. Pure but for the dice."""

from __future__ import annotations

import random

FIRST, MOST, FACTOR = 0.05, 5.0, 2.0


class Backoff:
    """Grows with every failure, and is spread: a thousand who lost a relay together do not come back together."""

    def __init__(self, first: float = FIRST, most: float = MOST) -> None:
        self._first, self._most = first, most
        self._next = first
        self.failures = 0

    def failed(self) -> float:
        """Seconds to wait now."""
        self.failures += 1
        now, self._next = self._next, min(self._most, self._next * FACTOR)
        return random.uniform(now / 2, now)

    def worked(self) -> None:
        self._next = self._first
        self.failures = 0
