"""Read the time in one place, so that tests can replace it.

Deadlines are on CLOCK_BOOTTIME: it never jumps, and it continues while the
machine is suspended, which is when a lease must run out.
"""

from __future__ import annotations

import time


def boottime() -> float:
    """Return the seconds since boot, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def walltime() -> float:
    """Return the seconds since the epoch. For people and records only; never compared between hosts."""
    return time.time()
