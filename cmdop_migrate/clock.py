"""Time, read in one place so that tests can give another.

Deadlines are on CLOCK_BOOTTIME: it never jumps, and it goes on counting while
the machine is suspended, which is exactly when a lease must run out.
"""

from __future__ import annotations

import time


def boottime() -> float:
    """Seconds since boot, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def walltime() -> float:
    """Seconds since the epoch. For people and records only; never compared between hosts."""
    return time.time()
