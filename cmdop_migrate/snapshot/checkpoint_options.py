"""Define the options and the result of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.snapshot import host_files
from cmdop_migrate.snapshot.capture.incremental import PreCopyRounds
from cmdop_migrate.snapshot.proof import Proof


@dataclass(frozen=True)
class CheckpointOptions:
    """Hold what the caller of a checkpoint asked for."""

    leave_running: bool = False
    tag: str | None = None
    carry: host_files.Carry = "mapped"
    reason: str = "checkpoint"  # for hooks, as is `to`
    to: str | None = None
    only_idle: float | None = None  # seconds the session must have been idle for; otherwise raise NotIdle
    migration: str | None = None  # the id of the migration the checkpoint is made for
    # Called before another host may take the session, which then stays here, frozen.
    hand_over: Callable[[Manifest], None] | None = None
    on_pack: Callable[[str], None] | None = None  # called, from any thread, with each pack that the store has
    prove: bool = True  # prove a park by a trial restore
    deadline: float | None = None  # CLOCK_BOOTTIME by which a park must be done: a proof that takes longer is skipped
    rounds: PreCopyRounds | None = None  # read only the memory written since the last of these rounds
    wait_quiet: float = 0.0  # seconds in which to retry a checkpoint that a temporary condition prevents


@dataclass(frozen=True)
class CheckpointResult:
    """Describe a checkpoint that was made, and what it cost."""

    manifest: Manifest
    frozen_s: float
    phases: dict[str, float]
    closed: list[dict[str, object]]
    hooks: list[dict[str, Any]]
    stopped_at: float  # CLOCK_BOOTTIME at the freeze
    printed_at: float  # CLOCK_BOOTTIME of its last output before that; 0 if it printed nothing on this host
    proof: Proof

    def to_json(self) -> dict[str, Any]:
        """Return what `checkpoint --json` prints."""
        sizes = self.manifest.sizes
        return {
            "checkpoint": self.manifest.checkpoint,
            "session": self.manifest.session,
            "token": self.manifest.token,
            "bytes": {
                "memory": sizes["memory"],
                "files": self.manifest.facts["files_bytes"],
                "stored": sizes["stored"],
                "new": sizes["new"],
            },
            "chunks": chunk_counts(self.manifest),
            "phases": self.phases,
            "frozen_s": self.frozen_s,
            "closed_connections": self.closed,
            "hooks": self.hooks,
            "proved": self.proof.proved,
            "skipped": self.proof.skipped,
        }


def chunk_counts(manifest: Manifest) -> dict[str, int]:
    """Count the chunks of a checkpoint. `shared` are those that the store already had, from earlier checkpoints of this
    or another session."""
    total, new = manifest.sizes["chunks"], manifest.sizes["new_chunks"]
    return {"total": total, "new": new, "shared": total - new}
