"""Prune: remove checkpoints, then the packs nobody needs, while others upload and prune.

The store has no locks, so both sides raise a flag before they look for the
other's. With U an upload and R a prune run:

    U: put uploads/U -> read doomed/* -> list packs -> … put packs … -> put manifest -> look for uploads/U -> delete it
    R: delete manifests -> list packs, read manifests -> put doomed/R -> list uploads -> read manifests -> delete packs

- U relies on a pack only if it is not doomed and then listed, in this order. If U did not see R's flag, R put it after
  U read doomed/, so R sees U's mark and leaves every pack U may rely on. If the flag was gone again, so were the packs,
  or another run's flag names them: U reads all flags of one moment (tombstones.py), never one before and one after.
- R lists uploads before it reads manifests again: an upload that ended in between is seen as one or the other.
- Packs left for the sake of U stay doomed, with the uploads that may rely on them (`waiting`). The next run deletes
  them when those uploads are over; uploads that began later have seen the flag. It may only count on an older
  tombstone that still stands after its own was put: then the pack was doomed all the time.
- A run never removes the tombstone of another that may still be deleting (`active`), unless it is stale; and a run
  that takes longer than half of that time stops deleting. A pack that is needed again is simply not taken over.
- A mark that was not refreshed for `stale_after` is removed, before manifests are read. Its upload, if it lives after
  all, misses it after publishing and checks its packs: doomed first, then presence (uploads.py).
- A branch's first manifest is published as an upload is, though it sends no pack: birth.py.
- A manifest that cannot be read blocks all deleting of packs: what it needs is not known.

Killed anywhere, a run leaves valid manifests with all their packs, and a tombstone that costs nothing but space.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from cmdop_migrate import log
from cmdop_migrate.clock import boottime, walltime
from cmdop_migrate.errors import ImageRefused, StoreDenied
from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.store import catalog, deletion_marks, index
from cmdop_migrate.images.store.catalog import Listed
from cmdop_migrate.images.store.deletion_marks import Tombstone
from cmdop_migrate.images.store.keep_policy import Keep, nothing, to_drop
from cmdop_migrate.images.store.upload_marks import STALE_AFTER
from cmdop_migrate.storage.base import Store
from cmdop_migrate.util import threads

_BATCH = 500
_logger = log.get("images.retention")


@dataclass(frozen=True)
class Pruned:
    """What a run did. `waiting` packs go with a later run; `unreadable` manifests kept every pack in place."""

    checkpoints: tuple[str, ...]
    packs: int
    bytes: int
    waiting: int
    unreadable: tuple[str, ...]


def prune(
    store: Store,
    ring: KeyRing,
    keep: Keep,
    parked: Callable[[str], bool],
    stale_after: float = STALE_AFTER,
    also: Collection[str] = (),
    dry_run: bool = False,
    needed: Collection[str | None] = (),
    spent: Callable[[Listed], bool] = nothing,
) -> Pruned:
    """Drop what `keep` does not keep, and what is `spent`, then the packs that are left over. `also` names checkpoints
    to drop whatever the rules say: the way to get rid of a damaged one. `needed` stay whatever the rules say. A dry run
    only says which checkpoints would go."""
    run = _Run(store, ring, stale_after)
    if dry_run:
        dropped = _chosen(store, keep, _clock(store), parked, also, needed, spent)
        return Pruned(tuple(entry.checkpoint for entry in dropped), 0, 0, 0, ())
    try:
        now = run.raise_flag({})
    except StoreDenied as error:
        # A full disk: what is dropped makes room for the flag. It is put before any pack goes, or none does.
        _logger.warning("checkpoints are dropped first: %s", error.message)
        now = _clock(store)
    dropped = _chosen(store, keep, now, parked, also, needed, spent)
    store.delete([entry.name for entry in dropped])
    return run.sweep(tuple(entry.checkpoint for entry in dropped))


def _clock(store: Store) -> float:
    """Where nothing is written the store's clock cannot be asked: this host's, unless it is plainly behind."""
    return max(walltime(), *(info.modified for info in store.list(layout.MANIFESTS)), 0.0)


def _chosen(
    store: Store,
    keep: Keep,
    now: float,
    parked: Callable[[str], bool],
    also: Collection[str],
    needed: Collection[str | None],
    spent: Callable[[Listed], bool],
) -> list[Listed]:
    entries = list(catalog.listed(store))
    chosen = [entry for entry in to_drop(entries, keep, now, parked, spent) if entry.checkpoint not in needed]
    return chosen + [entry for entry in entries if entry.checkpoint in also and entry not in chosen]


class _Run:
    """One prune run and its tombstone."""

    def __init__(self, store: Store, ring: KeyRing, stale_after: float) -> None:
        self._store, self._ring, self._stale_after = store, ring, stale_after
        self._id = layout.new_id()
        self._began = boottime()

    def raise_flag(self, packs: dict[str, frozenset[str] | None]) -> float:
        """Put this run's tombstone; -> the time by the store's clock."""
        self._store.put(layout.doomed_name(self._id), Tombstone(self._id, True, packs).encode())
        info = self._store.stat(layout.doomed_name(self._id))
        return info.modified if info is not None else 0.0

    def sweep(self, dropped: tuple[str, ...]) -> Pruned:
        packs = {
            p: info.size for info in self._store.list(layout.PACKS) if (p := layout.pack_of(info.name)) is not None
        }
        needed, unreadable = self._needed()
        if unreadable:
            self._store.delete([layout.doomed_name(self._id)])
            return Pruned(dropped, 0, 0, 0, unreadable)
        doomed = packs.keys() - needed
        now = self.raise_flag(dict.fromkeys(doomed))
        stones, garbage = deletion_marks.read_all(self._store)
        older = [stone for stone in stones if stone.run != self._id]
        alive = self._alive(now)
        blockers = {pack: _blockers(pack, older, alive) for pack in doomed}
        needed, unreadable = self._needed()
        if unreadable:
            free: list[str] = []
        else:
            free = sorted(pack for pack, uploads in blockers.items() if not uploads and pack not in needed)
        gone = self._delete(free)
        waiting = {pack: blockers[pack] for pack in doomed - gone - needed}
        self._lower_flag(waiting, older, now)
        self._store.delete([info.name for info in garbage if now - info.modified > self._stale_after])
        self._drop_indexes(alive)
        return Pruned(dropped, len(gone), sum(packs[pack] for pack in gone), len(waiting), unreadable)

    def _needed(self) -> tuple[set[str], tuple[str, ...]]:
        """All packs that manifests name, and the manifests that cannot be read."""
        needed: set[str] = set()
        unreadable = []
        # One that is gone since it was listed was dropped by another run.
        for entry, found in catalog.read_all(self._store, self._ring, catalog.listed(self._store)):
            if isinstance(found, Manifest):
                needed.update(found.packs)
            else:
                _logger.warning("no pack is deleted: %s: %s", entry.checkpoint[:12], found.message)
                unreadable.append(entry.checkpoint)
        return needed, tuple(unreadable)

    def _alive(self, now: float) -> frozenset[str]:
        """Uploads under way. Marks nobody refreshes any more are removed first."""
        marks = list(self._store.list(layout.UPLOADS))
        stale = [mark.name for mark in marks if now - mark.modified > self._stale_after]
        self._store.delete(stale)
        return frozenset(m.name.removeprefix(layout.UPLOADS) for m in marks if m.name not in stale)

    def _delete(self, free: list[str]) -> set[str]:
        gone: set[str] = set()
        for at in range(0, len(free), _BATCH):
            if boottime() - self._began > self._stale_after / 2:
                _logger.warning("this run took too long to delete safely; the next one goes on")
                break
            batch = free[at : at + _BATCH]
            self._store.delete([layout.pack_name(pack) for pack in batch])
            gone.update(batch)
        return gone

    def _lower_flag(self, waiting: dict[str, frozenset[str]], older: list[Tombstone], now: float) -> None:
        mine = layout.doomed_name(self._id)
        if waiting:
            self._store.put(mine, Tombstone(self._id, False, waiting).encode())
        over = [stone for stone in older if not stone.active or now - stone.modified > self._stale_after]
        self._store.delete([layout.doomed_name(stone.run) for stone in over])
        if not waiting:
            self._store.delete([mine])

    def _drop_indexes(self, alive: frozenset[str]) -> None:
        """Indexes none of whose packs exist are of no use. The packs are listed after: a new one keeps its index."""
        names = [info.name for info in self._store.list(layout.INDEXES)]
        present = {layout.pack_of(info.name) for info in self._store.list(layout.PACKS)}
        checkpoints = [name for name in map(layout.last_part, names) if name is not None and name not in alive]
        read = threads.each(lambda one: self._store.get(layout.index_name(one)), checkpoints, index.READERS, "indexes")
        useless = []
        for checkpoint, data in zip(checkpoints, read, strict=True):
            try:
                _, table = index.decode(checkpoint, data.result(), self._ring)
            except (KeyError, ImageRefused):
                continue  # gone, or not ours to judge
            if present.isdisjoint(table.packs):
                useless.append(layout.index_name(checkpoint))
        self._store.delete(useless)


def _blockers(pack: str, older: list[Tombstone], alive: frozenset[str]) -> frozenset[str]:
    """The uploads that may rely on a doomed pack: those alive now, but for any that saw an older tombstone."""
    blockers = alive
    for stone in older:
        uploads = stone.packs.get(pack)
        if uploads is not None:
            blockers &= uploads
    return blockers
