"""Prune: remove checkpoints, then the packs that no checkpoint needs, while others upload and prune.

The store has no locks, so both sides write a mark before they look for the other's. With U an upload and R a prune run:

    U: put uploads/U -> read doomed/* -> list packs -> … put packs … -> put manifest -> look for uploads/U -> delete it
    R: delete manifests -> list packs, read manifests -> put doomed/R -> list uploads -> read manifests -> delete packs

- U relies on a pack only if it is not marked for deletion and then listed, in this order. If U did not see R's mark, R
  put it after U read doomed/, so R sees U's upload mark and leaves every pack U may rely on. If the deletion mark was
  gone again, so were the packs, or another run's mark names them: U reads all deletion marks of one moment
  (deletion_marks.py), never one before and one after.
- R lists uploads before it reads manifests again: an upload that ended in between is seen as one or the other.
- Packs left for the sake of U stay marked, with the uploads that may rely on them (`waiting`). The next run deletes
  them when those uploads have ended; uploads that began later have seen the mark. It may only count on an older
  deletion mark that still exists after its own was put: then the pack was marked all the time.
- A run never removes the deletion mark of another that may still be deleting (`active`), unless it is stale; and a run
  that takes longer than half of that time stops deleting. A pack that is needed again is simply not taken over.
- An upload mark that was not refreshed for `stale_after` is removed, before manifests are read. Its upload, if it is
  alive after all, misses it after publishing and checks its packs: deletion marks first, then presence
  (upload_marks.py).
- A fork's initial manifest is published as an upload is, though it sends no pack: fork_manifest.py.
- A manifest that cannot be read blocks all deleting of packs: what it needs is not known.

Killed anywhere, a run leaves valid manifests with all their packs, and a deletion mark that costs nothing but space.
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
from cmdop_migrate.images.store.catalog import ListedCheckpoint
from cmdop_migrate.images.store.deletion_marks import DeletionMark
from cmdop_migrate.images.store.keep_policy import KeepPolicy, nothing, to_drop
from cmdop_migrate.images.store.upload_marks import STALE_AFTER
from cmdop_migrate.storage.base import Store
from cmdop_migrate.util import threads

_BATCH = 500
_logger = log.get("images.prune")


@dataclass(frozen=True)
class Pruned:
    """Report what a run did. `waiting` packs are deleted by a later run; any `unreadable` manifest kept all packs in
    place."""

    checkpoints: tuple[str, ...]
    packs: int
    bytes: int
    waiting: int
    unreadable: tuple[str, ...]


def prune(
    store: Store,
    ring: KeyRing,
    keep: KeepPolicy,
    parked: Callable[[str], bool],
    stale_after: float = STALE_AFTER,
    also: Collection[str] = (),
    dry_run: bool = False,
    needed: Collection[str | None] = (),
    spent: Callable[[ListedCheckpoint], bool] = nothing,
) -> Pruned:
    """Drop the checkpoints that `keep` does not keep and those that are `spent`, then the packs no longer needed.
    `also` names checkpoints to drop in any case: the way to remove a damaged one. `needed` ones are kept in any case. A
    dry run only reports which checkpoints would be removed."""
    run = _Run(store, ring, stale_after)
    if dry_run:
        dropped = _chosen(store, keep, _clock(store), parked, also, needed, spent)
        return Pruned(tuple(entry.checkpoint for entry in dropped), 0, 0, 0, ())
    try:
        now = run.put_mark({})
    except StoreDenied as error:
        # A full disk: dropping manifests makes room for the mark. The mark is put before any pack is deleted.
        _logger.warning("dropping checkpoints before writing the deletion mark: %s", error.message)
        now = _clock(store)
    dropped = _chosen(store, keep, now, parked, also, needed, spent)
    store.delete([entry.name for entry in dropped])
    return run.sweep(tuple(entry.checkpoint for entry in dropped))


def _clock(store: Store) -> float:
    """Return the time without writing: the store's clock cannot be read then, so use this host's unless it is plainly
    behind."""
    return max(walltime(), *(info.modified for info in store.list(layout.MANIFESTS)), 0.0)


def _chosen(
    store: Store,
    keep: KeepPolicy,
    now: float,
    parked: Callable[[str], bool],
    also: Collection[str],
    needed: Collection[str | None],
    spent: Callable[[ListedCheckpoint], bool],
) -> list[ListedCheckpoint]:
    entries = list(catalog.listed(store))
    chosen = [entry for entry in to_drop(entries, keep, now, parked, spent) if entry.checkpoint not in needed]
    return chosen + [entry for entry in entries if entry.checkpoint in also and entry not in chosen]


class _Run:
    """Execute one prune run with its deletion mark."""

    def __init__(self, store: Store, ring: KeyRing, stale_after: float) -> None:
        self._store, self._ring, self._stale_after = store, ring, stale_after
        self._id = layout.new_id()
        self._began = boottime()

    def put_mark(self, packs: dict[str, frozenset[str] | None]) -> float:
        """Put this run's deletion mark, and return the time by the store's clock."""
        self._store.put(layout.deletion_mark_name(self._id), DeletionMark(self._id, True, packs).encode())
        info = self._store.stat(layout.deletion_mark_name(self._id))
        return info.modified if info is not None else 0.0

    def sweep(self, dropped: tuple[str, ...]) -> Pruned:
        """Delete the packs that no manifest needs, by the protocol above."""
        packs = {
            p: info.size for info in self._store.list(layout.PACKS) if (p := layout.pack_of(info.name)) is not None
        }
        needed, unreadable = self._needed()
        if unreadable:
            self._store.delete([layout.deletion_mark_name(self._id)])
            return Pruned(dropped, 0, 0, 0, unreadable)
        marked = packs.keys() - needed
        now = self.put_mark(dict.fromkeys(marked))
        marks, garbage = deletion_marks.read_all(self._store)
        older = [mark for mark in marks if mark.run != self._id]
        alive = self._alive(now)
        blockers = {pack: _blockers(pack, older, alive) for pack in marked}
        needed, unreadable = self._needed()
        if unreadable:
            free: list[str] = []
        else:
            free = sorted(pack for pack, uploads in blockers.items() if not uploads and pack not in needed)
        gone = self._delete(free)
        waiting = {pack: blockers[pack] for pack in marked - gone - needed}
        self._retire_mark(waiting, older, now)
        self._store.delete([info.name for info in garbage if now - info.modified > self._stale_after])
        self._drop_indexes(alive)
        return Pruned(dropped, len(gone), sum(packs[pack] for pack in gone), len(waiting), unreadable)

    def _needed(self) -> tuple[set[str], tuple[str, ...]]:
        """Return all packs that manifests name, and the manifests that cannot be read."""
        needed: set[str] = set()
        unreadable = []
        # An entry that is gone since the listing was dropped by another run.
        for entry, result in catalog.read_all(self._store, self._ring, catalog.listed(self._store)):
            if isinstance(result, Manifest):
                needed.update(result.packs)
            else:
                _logger.warning(
                    "no pack is deleted: manifest %s cannot be read: %s", entry.checkpoint[:12], result.message
                )
                unreadable.append(entry.checkpoint)
        return needed, tuple(unreadable)

    def _alive(self, now: float) -> frozenset[str]:
        """Return the uploads in progress. Remove upload marks that are no longer refreshed first."""
        marks = list(self._store.list(layout.UPLOADS))
        stale = [mark.name for mark in marks if now - mark.modified > self._stale_after]
        self._store.delete(stale)
        return frozenset(m.name.removeprefix(layout.UPLOADS) for m in marks if m.name not in stale)

    def _delete(self, free: list[str]) -> set[str]:
        gone: set[str] = set()
        for at in range(0, len(free), _BATCH):
            if boottime() - self._began > self._stale_after / 2:
                _logger.warning("this run took too long to delete safely; the next run continues")
                break
            batch = free[at : at + _BATCH]
            self._store.delete([layout.pack_name(pack) for pack in batch])
            gone.update(batch)
        return gone

    def _retire_mark(self, waiting: dict[str, frozenset[str]], older: list[DeletionMark], now: float) -> None:
        """Keep only the waiting packs in the deletion mark, and remove the older marks that it replaces."""
        mine = layout.deletion_mark_name(self._id)
        if waiting:
            self._store.put(mine, DeletionMark(self._id, False, waiting).encode())
        over = [mark for mark in older if not mark.active or now - mark.modified > self._stale_after]
        self._store.delete([layout.deletion_mark_name(mark.run) for mark in over])
        if not waiting:
            self._store.delete([mine])

    def _drop_indexes(self, alive: frozenset[str]) -> None:
        """Delete indexes none of whose packs exist. List the packs after the indexes, so that a new pack keeps its
        index."""
        names = [info.name for info in self._store.list(layout.INDEXES)]
        present = {layout.pack_of(info.name) for info in self._store.list(layout.PACKS)}
        checkpoints = [name for name in map(layout.last_part, names) if name is not None and name not in alive]
        read = threads.each(
            lambda checkpoint: self._store.get(layout.index_name(checkpoint)), checkpoints, index.READERS, "indexes"
        )
        useless = []
        for checkpoint, data in zip(checkpoints, read, strict=True):
            try:
                _, table = index.decode(checkpoint, data.result(), self._ring)
            except (KeyError, ImageRefused):
                continue  # gone, or of an unknown key
            if present.isdisjoint(table.packs):
                useless.append(layout.index_name(checkpoint))
        self._store.delete(useless)


def _blockers(pack: str, older: list[DeletionMark], alive: frozenset[str]) -> frozenset[str]:
    """Return the uploads that may rely on a marked pack: those alive now, except any that saw an older mark."""
    blockers = alive
    for mark in older:
        uploads = mark.packs.get(pack)
        if uploads is not None:
            blockers &= uploads
    return blockers
