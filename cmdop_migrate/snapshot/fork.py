"""Branch a running session: a checkpoint that leaves it running, restored under a new identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cmdop_migrate.host.host import Host
from cmdop_migrate.model import session_name
from cmdop_migrate.snapshot import checkpoint, restore
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions, CheckpointResult
from cmdop_migrate.snapshot.rebuild import restore_session


def fork(this_host: Host, reference: str, name: str, progress: Callable[[str], None]) -> dict[str, Any]:
    session_name(name)
    this_host.name_is_free(name)
    saved = checkpoint.checkpoint(this_host, reference, CheckpointOptions(leave_running=True, reason="fork"), progress)
    facts = restore.restore(this_host, saved.manifest.checkpoint, restore_session.Wanted(fork=name), progress)
    return branched(this_host, saved, facts)


def branched(this_host: Host, saved: CheckpointResult, facts: dict[str, Any]) -> dict[str, Any]:
    """What `fork` answers, `facts` being what the restore of the branch did; on record with the parent: the branch
    begins on the parent's own chunks, all of them shared and none copied."""
    manifest = saved.manifest
    shared = {"shared_chunks": manifest.sizes["chunks"], "shared_bytes": manifest.sizes["stored"]}
    branch = {"branch": facts["session"], "name": facts["name"], "where": facts["host"]}
    this_host.note("forked", manifest.session, **branch, checkpoint=manifest.checkpoint, **shared)
    told = {"hooks": [*saved.hooks, *facts.get("hooks", [])]}
    return {**facts, **told, **shared, "parent": manifest.session, "checkpoint": manifest.checkpoint}
