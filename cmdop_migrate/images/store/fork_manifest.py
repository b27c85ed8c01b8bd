"""A branch's first checkpoint: its parent's, under the branch's own name. Only a manifest is written, no chunk.

From it the branch may be brought back until it has made one of its own, and by
it prune knows that its chunks are needed, whatever becomes of the parent's.

Published as an upload is (retention.py): under a mark, and good only if the
source's manifest still stands afterwards. A run that removes the source later
finds the mark, or this one. So does a run that dooms the packs now: the source
still stands. Packs may be doomed from before, by a run that did not know of the
source; it looks at all manifests again before it deletes, and finds the source
or this one. (A store that is listed in pages leaves one order: the listing is
past this name when it is put, and not yet at the source's when another run
removes that.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cmdop_migrate import log
from cmdop_migrate.clock import walltime
from cmdop_migrate.errors import CheckpointNotFound, Unreachable
from cmdop_migrate.images.format import layout, manifest
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.store.upload_marks import UploadMark
from cmdop_migrate.storage.base import Store

_logger = log.get("images.birth")


def of(source: Manifest, session: str, token: int, facts: Mapping[str, Any]) -> Manifest:
    """What `session` is born with, on the chunks of `source`. Pure, but for the id and the time."""
    return replace(
        source,
        session=layout.checked_id(session, "session id"),
        checkpoint=layout.birth_id(session),
        token=token,
        created=round(walltime(), 3),
        parent=source.checkpoint,
        sizes={**source.sizes, "new": 0, "new_chunks": 0},
        facts=facts,
    )


def publish(store: Store, ring: KeyRing, source: Manifest, made: Manifest) -> None:
    """When this returns `made` exists, and all its packs do. CheckpointNotFound: `source` was pruned meanwhile."""
    data = manifest.encode(made, ring.get(made.key))
    manifest.decode(made.session, made.checkpoint, data, ring)  # what we could not read back we do not publish
    mark = UploadMark(store, made.session, made.checkpoint)
    mark.begin()
    try:
        _must_stand(store, source)  # first: killed after the put, we leave one whose packs are there
        store.put(made.name, data)
        try:
            _must_stand(store, source)
            if not mark.holds(made.packs):
                raise _removed(source)
        except CheckpointNotFound:
            store.delete([made.name])
            raise
    finally:
        _end(mark)


def _must_stand(store: Store, source: Manifest) -> None:
    if store.stat(source.name) is None:
        raise _removed(source)


def _removed(source: Manifest) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"checkpoint {source.checkpoint[:12]} was removed while it was being restored",
        "Another one may do. See: cmdop-migrate checkpoints ls",
    )


def _end(mark: UploadMark) -> None:
    try:
        mark.end()
    except Unreachable as error:
        _logger.warning("the mark of this branch stays until it is old: %s", error.message)
