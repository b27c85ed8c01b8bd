"""Compute bounds on time that hold on a busy machine too.

A test states a bound in seconds of an idle machine. Where more processes want to run than there are processors, all of
them take longer, so the bound grows by that factor. On an idle machine it is exact.
"""

from __future__ import annotations

import os
import time

LARGEST_FACTOR = 8.0  # beyond it the time limit of a test (pytest-timeout) would speak first


def busy_factor() -> float:
    """Return how many processes want each processor, now or on average of the last minute: 1.0 on an idle machine."""
    with open("/proc/loadavg") as file:
        words = file.read().split()
    wanting = max(float(words[0]), float(words[3].split("/")[0]))
    return min(max(wanting / (os.cpu_count() or 1), 1.0), LARGEST_FACTOR)


def bound(seconds: float) -> float:
    """Return the time after which something that takes `seconds` at most on an idle machine is late on this one."""
    return seconds * busy_factor()


class Deadline:
    """Count down `within` seconds of an idle machine: the deadline moves away while the machine is busy."""

    def __init__(self, within: float) -> None:
        self._left = within
        self._seen = time.monotonic()

    def is_over(self) -> bool:
        """Return whether the time is used up. Call it often: each call counts the time since the one before."""
        now = time.monotonic()
        self._left -= (now - self._seen) / busy_factor()
        self._seen = now
        return self._left < 0
