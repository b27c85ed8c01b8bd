"""Branch a running session: a checkpoint that leaves it running, restored under a new identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cmdop_migrate.flows import checkpoint, incarnation, restore
from cmdop_migrate.model import session_name
from cmdop_migrate.session.records import Records


def fork(records: Records, reference: str, name: str, progress: Callable[[str], None]) -> dict[str, Any]:
    session_name(name)
    records.name_is_free(name)
    saved = checkpoint.checkpoint(records, reference, checkpoint.Wanted(leave_running=True, reason="fork"), progress)
    facts = restore.restore(records, saved.manifest.checkpoint, incarnation.Wanted(fork=name), progress)
    told = {"hooks": [*saved.hooks, *facts["hooks"]]}
    return {**facts, **told, "parent": saved.manifest.session, "checkpoint": saved.manifest.checkpoint}
