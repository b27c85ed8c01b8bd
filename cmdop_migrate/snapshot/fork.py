"""Fork a running session: checkpoint it without ending it, and restore the checkpoint under a new identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cmdop_migrate.host.host import Host
from cmdop_migrate.model import session_name
from cmdop_migrate.snapshot import checkpoint, restore
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions, CheckpointResult
from cmdop_migrate.snapshot.restore_options import RestoreOptions, RestoreResult


@dataclass(frozen=True)
class ForkResult:
    """Describe a fork that runs: the checkpoint of its parent, and its restore.

    The fork starts on its parent's own chunks, all of them shared and none copied."""

    saved: CheckpointResult
    restored: RestoreResult

    @property
    def hooks(self) -> list[dict[str, Any]]:
        """Return the outcomes of the hooks of both steps."""
        return [*self.saved.hooks, *self.restored.hooks]

    @property
    def shared(self) -> dict[str, int]:
        """Return how many chunks and bytes the fork shares with its parent."""
        sizes = self.saved.manifest.sizes
        return {"shared_chunks": sizes["chunks"], "shared_bytes": sizes["stored"]}

    def to_json(self) -> dict[str, Any]:
        """Return what `fork --json` prints."""
        manifest = self.saved.manifest
        return {
            **self.restored.to_json(),
            "hooks": self.hooks,
            **self.shared,
            "parent": manifest.session,
            "checkpoint": manifest.checkpoint,
        }


def fork(this_host: Host, reference: str, name: str, progress: Callable[[str], None]) -> ForkResult:
    """Fork a running session on this host, under the name `name`. Both run when this returns."""
    session_name(name)
    this_host.name_is_free(name)
    saved = checkpoint.checkpoint(this_host, reference, CheckpointOptions(leave_running=True, reason="fork"), progress)
    restored = restore.restore(this_host, saved.manifest.checkpoint, RestoreOptions(fork=name), progress)
    return record_fork(this_host, ForkResult(saved, restored))


def record_fork(this_host: Host, result: ForkResult) -> ForkResult:
    """Write the event of a fork, for its parent, and return the fork."""
    manifest, restored = result.saved.manifest, result.restored
    branch = {"branch": restored.session, "name": restored.name, "where": restored.host}
    this_host.note("forked", manifest.session, **branch, checkpoint=manifest.checkpoint, **result.shared)
    return result
