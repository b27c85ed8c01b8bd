"""Read and set on which processors a session's threads may run: CRIU does not carry it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from cmdop_migrate.util import proc

Affinities = dict[str, list[int]]  # by the thread's innermost number, as text: JSON's keys are texts


def read(pids: Iterable[int]) -> Affinities:
    """Return the processors of the threads that may not run on all of them."""
    found: Affinities = {}
    everywhere = os.sched_getaffinity(0)
    for inner, thread in threads(pids):
        try:
            own = os.sched_getaffinity(thread)
        except ProcessLookupError:
            continue
        if own != everywhere:
            found[inner] = sorted(own)
    return found


def apply(pids: Iterable[int], wanted: Affinities) -> None:
    """Bind threads to their processors, as far as this machine has those: a thread bound to others may run on all."""
    if not wanted:
        return
    here = os.sched_getaffinity(0)
    for inner, thread in threads(pids):
        if own := here & set(wanted.get(inner, ())):
            os.sched_setaffinity(thread, own)


def threads(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Return (innermost number, number here) of all threads of these processes."""
    found = []
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/task"):
                found.append((str(proc.inner_pid(int(name))), int(name)))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
