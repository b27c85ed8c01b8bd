"""Write a fork's initial checkpoint: its parent's, under the fork's own name. Only a manifest is written, no chunk.

The fork can be restored from it until it has made a checkpoint of its own, and prune sees by it that the chunks are
needed, even after the parent's checkpoint is removed.

It is published as an upload is (prune.py): under an upload mark, and valid only if the source's manifest still exists
afterwards. A run that removes the source later finds the mark, or this manifest. So does a run that marks the packs for
deletion now: the source still exists. Packs may be marked from earlier, by a run that did not know of the source; that
run reads all manifests again before it deletes, and finds the source or this manifest. (A store that is listed in pages
leaves one order open: the listing is past this name when it is put, and not yet at the source's name when another run
removes the source.)
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

_logger = log.get("images.fork")


def of(source: Manifest, session: str, token: int, facts: Mapping[str, Any]) -> Manifest:
    """Return the initial manifest of the fork `session`, on the chunks of `source`. Pure, except for the id and the
    time."""
    return replace(
        source,
        session=layout.checked_id(session, "session id"),
        checkpoint=layout.fork_checkpoint_id(session),
        token=token,
        created=round(walltime(), 3),
        parent=source.checkpoint,
        sizes={**source.sizes, "new": 0, "new_chunks": 0},
        facts=facts,
    )


def publish(store: Store, ring: KeyRing, source: Manifest, made: Manifest) -> None:
    """Publish the manifest. When this returns, `made` and all its packs exist. Raise CheckpointNotFound if `source` was
    pruned meanwhile."""
    data = manifest.encode(made, ring.get(made.key))
    manifest.decode(made.session, made.checkpoint, data, ring)  # never publish what cannot be read back
    mark = UploadMark(store, made.session, made.checkpoint)
    mark.begin()
    try:
        _check_exists(store, source)  # first, so that a kill after the put leaves a manifest whose packs exist
        store.put(made.name, data)
        try:
            _check_exists(store, source)
            if not mark.holds(made.packs):
                raise _removed(source)
        except CheckpointNotFound:
            store.delete([made.name])
            raise
    finally:
        _end(mark)


def _check_exists(store: Store, source: Manifest) -> None:
    if store.stat(source.name) is None:
        raise _removed(source)


def _removed(source: Manifest) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"checkpoint {source.checkpoint[:12]} was removed while it was being restored",
        "Use another checkpoint. See: cmdop-migrate checkpoints ls",
    )


def _end(mark: UploadMark) -> None:
    try:
        mark.end()
    except Unreachable as error:
        _logger.warning("the upload mark of this fork stays in the store until it expires: %s", error.message)
