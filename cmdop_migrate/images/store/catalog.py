"""Which checkpoints a store holds, and one of them by its id or a unique prefix."""

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
class Listed:
    """A manifest's name and age by the store's clock; nothing of it is read or believed yet."""

    session: str
    checkpoint: str
    modified: float
    size: int

    @property
    def name(self) -> str:
        return layout.manifest_name(self.session, self.checkpoint)

    @property
    def is_birth(self) -> bool:
        """A branch began with it: another session's checkpoint under this one's name."""
        return layout.is_birth(self.session, self.checkpoint)


def listed(store: Store, session: str | None = None) -> Iterator[Listed]:
    prefix = layout.MANIFESTS if session is None else f"{layout.MANIFESTS}{session}/"
    for info in store.list(prefix):
        ids = layout.manifest_of(info.name)
        if ids is not None:
            yield Listed(*ids, info.modified, info.size)


def find(store: Store, checkpoint: str, session: str | None = None) -> Listed:
    """The checkpoint with this id or unique prefix; looked for in `session` first. Nothing is no prefix: who gives an
    empty variable does not mean the only one there is."""
    for where in ([session] if session else []) + [None] if checkpoint else []:
        found = [entry for entry in listed(store, where) if entry.checkpoint.startswith(checkpoint)]
        exact = [entry for entry in found if entry.checkpoint == checkpoint]
        if len(exact or found) > 1:
            names = ", ".join(entry.checkpoint[:16] for entry in found[:5])
            raise Usage(f"several checkpoints begin with {checkpoint!r}: {names}", "Give more digits.")
        if found:
            return (exact or found)[0]
    raise CheckpointNotFound(f"no checkpoint {checkpoint!r} in {store.url}", "See: cmdop-migrate checkpoints ls.")


def read(store: Store, ring: KeyRing, entry: Listed) -> Manifest:
    """Load and check one. ImageRefused when it is not to be trusted, CheckpointNotFound when it is gone."""
    if entry.size > manifest.MAX_MANIFEST:
        raise ImageRefused(f"manifest {entry.checkpoint[:12]} is absurdly large", "cmdop-migrate made no such thing.")
    try:
        data = store.get(entry.name)
    except KeyError:
        raise CheckpointNotFound(
            f"checkpoint {entry.checkpoint[:12]} was just removed", "See: cmdop-migrate checkpoints ls."
        ) from None
    return manifest.decode(entry.session, entry.checkpoint, data, ring)


def read_all(
    store: Store, ring: KeyRing, entries: Iterable[Listed]
) -> Iterator[tuple[Listed, Manifest | ImageRefused]]:
    """As `read`, of each in their order, or what is wrong with it. One that is gone since it was listed is left out."""
    entries = list(entries)
    found = threads.each(partial(read, store, ring), entries, READERS, "manifests")
    for entry, one in zip(entries, found, strict=True):
        try:
            yield entry, one.result()
        except ImageRefused as error:
            yield entry, error
        except CheckpointNotFound:
            continue


def named(store: Store, ring: KeyRing, entries: Iterable[Listed], name: str) -> set[str]:
    """The sessions that were called so. What cannot be read is somebody else's, or damaged: it cannot be meant."""
    found = read_all(store, ring, entries)
    return {entry.session for entry, one in found if isinstance(one, Manifest) and one.facts.get("name") == name}


def load(store: Store, ring: KeyRing, checkpoint: str, session: str | None = None) -> Manifest:
    """As `find`, then `read`; where all of its name is known, by asking for it."""
    if session is not None and len(checkpoint) == layout.ID_DIGITS:
        try:
            data = store.get(layout.manifest_name(session, checkpoint), 0, manifest.MAX_MANIFEST + 1)
        except KeyError:
            pass  # another session's, which this one was forked from
        else:
            return manifest.decode(session, checkpoint, data, ring)
    return read(store, ring, find(store, checkpoint, session))
