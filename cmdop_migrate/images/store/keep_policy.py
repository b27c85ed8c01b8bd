"""Decide which checkpoints to keep. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cmdop_migrate.images.store.catalog import ListedCheckpoint


@dataclass(frozen=True)
class KeepPolicy:
    """Keep a checkpoint if either rule keeps it. With neither rule set, keep all."""

    last: int | None = None
    within: float | None = None


def nothing(_entry: ListedCheckpoint) -> bool:
    """Return False for every checkpoint: the default `spent`."""
    return False


def to_drop(
    entries: Iterable[ListedCheckpoint],
    keep: KeepPolicy,
    now: float,
    parked: Callable[[str], bool],
    spent: Callable[[ListedCheckpoint], bool] = nothing,
) -> list[ListedCheckpoint]:
    """Return the checkpoints that may be removed. Ages are by the store's clock. The newest checkpoint of a parked
    session is always kept: it *is* the session. A `spent` checkpoint is removed even if a rule keeps it: it is a copy
    that is no longer needed."""
    if keep.last is None and keep.within is None:
        return []
    sessions: dict[str, list[ListedCheckpoint]] = defaultdict(list)
    for entry in entries:
        sessions[entry.session].append(entry)
    dropped = []
    for session, mine in sorted(sessions.items()):
        mine.sort(key=lambda e: (e.modified, e.checkpoint), reverse=True)
        newest = mine[0].modified
        for rank, entry in enumerate(mine):
            kept = keep.last is not None and rank < keep.last
            kept = kept or (keep.within is not None and now - entry.modified <= keep.within)
            # Several may carry the newest second: none of them is dropped.
            kept = kept or (entry.modified == newest and parked(session))
            if not kept or spent(entry):
                dropped.append(entry)
    return dropped
