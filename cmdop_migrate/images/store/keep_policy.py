"""Which checkpoints to keep. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cmdop_migrate.images.store.catalog import Listed


@dataclass(frozen=True)
class Keep:
    """A checkpoint stays if either rule keeps it. With neither, all stay."""

    last: int | None = None
    within: float | None = None


def nothing(_entry: Listed) -> bool:
    return False


def to_drop(
    entries: Iterable[Listed],
    keep: Keep,
    now: float,
    parked: Callable[[str], bool],
    spent: Callable[[Listed], bool] = nothing,
) -> list[Listed]:
    """What may go. Ages are by the store's clock. The newest of a parked session never goes: it *is* the session. What
    is `spent` goes whatever the rules keep: it is a copy that nobody needs any more."""
    if keep.last is None and keep.within is None:
        return []
    sessions: dict[str, list[Listed]] = defaultdict(list)
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
