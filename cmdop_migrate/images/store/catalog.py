"""List the checkpoints that a store holds, and find one by its id or a unique prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from cmdop_migrate.errors import CheckpointNotFound, ImageRefused, Usage
from cmdop_migrate.images.format import layout, manifest
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.storage.base import Store
from cmdop_migrate.util import threads

READERS = 16  # requests at a time


@dataclass(frozen=True)
class ListedCheckpoint:
    """Name a manifest and its age by the store's clock; the manifest itself is not read or verified yet."""

    session: str
    checkpoint: str
    modified: float
    size: int

    @property
    def name(self) -> str:
        return layout.manifest_name(self.session, self.checkpoint)

    @property
    def is_fork(self) -> bool:
        """Return True if a fork started with it: another session's checkpoint under this session's name."""
        return layout.is_fork(self.session, self.checkpoint)


def listed(store: Store, session: str | None = None) -> Iterator[ListedCheckpoint]:
    """Yield the checkpoints in the store, or those of one session."""
    prefix = layout.MANIFESTS if session is None else f"{layout.MANIFESTS}{session}/"
    for info in store.list(prefix):
        ids = layout.manifest_of(info.name)
        if ids is not None:
            yield ListedCheckpoint(*ids, info.modified, info.size)


def find(store: Store, checkpoint: str, session: str | None = None) -> ListedCheckpoint:
    """Return the checkpoint with this id or unique prefix; look in `session` first. The empty string matches nothing: a
    user who passes an empty variable does not mean the only checkpoint there is."""
    for where in ([session] if session else []) + [None] if checkpoint else []:
        matches = [entry for entry in listed(store, where) if entry.checkpoint.startswith(checkpoint)]
        exact = [entry for entry in matches if entry.checkpoint == checkpoint]
        if len(exact or matches) > 1:
            names = ", ".join(entry.checkpoint[:16] for entry in matches[:5])
            raise Usage(f"several checkpoints begin with {checkpoint!r}: {names}", "Give more digits.")
        if matches:
            return (exact or matches)[0]
    raise CheckpointNotFound(f"no checkpoint {checkpoint!r} in {store.url}", "See: cmdop-migrate checkpoints ls.")


def read(store: Store, ring: KeyRing, entry: ListedCheckpoint) -> Manifest:
    """Load and verify one manifest. Raise ImageRefused if it is not authentic, CheckpointNotFound if it is gone."""
    if entry.size > manifest.MAX_MANIFEST:
        raise ImageRefused(f"manifest {entry.checkpoint[:12]} is too large", "cmdop-migrate did not write it.")
    try:
        data = store.get(entry.name)
    except KeyError:
        raise CheckpointNotFound(
            f"checkpoint {entry.checkpoint[:12]} was just removed", "See: cmdop-migrate checkpoints ls."
        ) from None
    return manifest.decode(entry.session, entry.checkpoint, data, ring)


def read_all(
    store: Store, ring: KeyRing, entries: Iterable[ListedCheckpoint]
) -> Iterator[tuple[ListedCheckpoint, Manifest | ImageRefused]]:
    """Yield each entry in order with its manifest, or with the error if it cannot be trusted. Leave out entries that
    are gone since they were listed."""
    entries = list(entries)
    manifests = threads.each(partial(read, store, ring), entries, READERS, "manifests")
    for entry, pending in zip(entries, manifests, strict=True):
        try:
            yield entry, pending.result()
        except ImageRefused as error:
            yield entry, error
        except CheckpointNotFound:
            continue


def named(store: Store, ring: KeyRing, entries: Iterable[ListedCheckpoint], name: str) -> set[str]:
    """Return the ids of the sessions that have this name. Ignore unreadable manifests: they are of another key, or
    damaged, so the user cannot mean them."""
    return {
        entry.session
        for entry, result in read_all(store, ring, entries)
        if isinstance(result, Manifest) and result.facts.get("name") == name
    }


def load(store: Store, ring: KeyRing, checkpoint: str, session: str | None = None) -> Manifest:
    """Find and read one checkpoint; get it directly if its full name is known."""
    if session is not None and len(checkpoint) == layout.ID_DIGITS:
        try:
            data = store.get(layout.manifest_name(session, checkpoint), 0, manifest.MAX_MANIFEST + 1)
        except KeyError:
            pass  # it belongs to another session, from which this one was forked
        else:
            return manifest.decode(session, checkpoint, data, ring)
    return read(store, ring, find(store, checkpoint, session))
