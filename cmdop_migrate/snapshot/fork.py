"""Branch a running session: a checkpoint that leaves it running, restored under a new identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cmdop_migrate.host.host import Records
from cmdop_migrate.model import session_name
from cmdop_migrate.snapshot import checkpoint, restore
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions, CheckpointResult
from cmdop_migrate.snapshot.rebuild import restore_session


def fork(records: Records, reference: str, name: str, progress: Callable[[str], None]) -> dict[str, Any]:
    session_name(name)
    records.name_is_free(name)
    saved = checkpoint.checkpoint(records, reference, CheckpointOptions(leave_running=True, reason="fork"), progress)
    facts = restore.restore(records, saved.manifest.checkpoint, restore_session.Wanted(fork=name), progress)
    return branched(records, saved, facts)


def branched(records: Records, saved: CheckpointResult, facts: dict[str, Any]) -> dict[str, Any]:
    """What `fork` answers, `facts` being what the restore of the branch did; on record with the parent: the branch
    begins on the parent's own chunks, all of them shared and none copied."""
    manifest = saved.manifest
    shared = {"shared_chunks": manifest.sizes["chunks"], "shared_bytes": manifest.sizes["stored"]}
    branch = {"branch": facts["session"], "name": facts["name"], "where": facts["host"]}
    records.note("forked", manifest.session, **branch, checkpoint=manifest.checkpoint, **shared)
    told = {"hooks": [*saved.hooks, *facts.get("hooks", [])]}
    return {**facts, **told, **shared, "parent": manifest.session, "checkpoint": manifest.checkpoint}
