"""Limit log lines of one kind: a flood of refusals must not fill the disk. Pure; the time is a parameter."""

from __future__ import annotations

from collections import Counter


class LogBudget:
    """Allow at most `most` lines of each kind per second. Suppressed lines are counted, and the count is reported with
    the next line of that kind."""

    def __init__(self, most: int = 10) -> None:
        self._most = most
        self._second = 0
        self._used: Counter[str] = Counter()
        self._suppressed: Counter[str] = Counter()

    def take(self, kind: str, now: float) -> int | None:
        """Return how many lines of this kind were suppressed since the last one, or None if this one is suppressed."""
        if int(now) != self._second:
            self._second = int(now)
            self._used.clear()
        if self._used[kind] >= self._most:
            self._suppressed[kind] += 1
            return None
        self._used[kind] += 1
        return self._suppressed.pop(kind, 0)
