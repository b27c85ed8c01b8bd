"""Read until when each holder lets its session run, from the timer that the holder has set in the kernel.

No holder has to answer for that, least of all one that is stopped.
"""

from __future__ import annotations

import os
import time

from cmdop_migrate.holder import cgroup

LOCK = "holder.lock"
TIMER = "anon_inode:[timerfd]"


def read(holders: str) -> dict[str, float]:
    """Return, by session, a time on CLOCK_BOOTTIME; one that has passed is now or earlier. `holders`: the cgroup that
    the holders are in. Holders that are about to end are left out."""
    found = {}
    for pid in cgroup.pids(holders):
        links = _links(pid)
        kept = [os.path.dirname(link) for link in links.values() if os.path.basename(link) == LOCK]
        times = [_fires_at(pid, fd) for fd, link in links.items() if link == TIMER]
        known = [moment for moment in times if moment is not None]
        if kept and known:
            found[os.path.basename(kept[0])] = known[0]
    return found


def _fires_at(pid: int, fd: str) -> float | None:
    """Return when the timer fires; None: it is gone, or of another clock."""
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii") as info:
            facts = dict(line.split(":", 1) for line in info)
    except OSError:
        return None
    if int(facts["clockid"]) != time.CLOCK_BOOTTIME:
        return None
    seconds, nanoseconds = facts["it_value"].strip(" ()\n").split(",")
    return now + int(seconds) + int(nanoseconds) / 1e9


def _links(pid: int) -> dict[str, str]:
    """Return what the process's descriptors refer to."""
    found = {}
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            found[fd] = os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:  # the process or a descriptor is gone: the next look sees the rest
        return found
    return found
