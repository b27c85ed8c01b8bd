"""What a checkpoint is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.snapshot import host_files
from cmdop_migrate.snapshot.capture.incremental import Rounds
from cmdop_migrate.snapshot.proof import Proof


@dataclass(frozen=True)
class CheckpointOptions:
    """What the caller of a checkpoint asked for."""

    leave_running: bool = False
    tag: str | None = None
    carry: host_files.Carry = "mapped"
    reason: str = "checkpoint"  # for hooks, as is `to`
    to: str | None = None
    only_idle: float | None = None  # for so many seconds; else it is left alone
    migration: str | None = None  # what it is made for
    hand_over: Callable[[Manifest], None] | None = None  # called before another may have it; it then stays, frozen
    on_pack: Callable[[str], None] | None = None  # called, from any thread, with each pack that the store has
    prove: bool = True  # a park, by a trial restore
    deadline: float | None = None  # CLOCK_BOOTTIME by which a park must be done: a proof that takes longer is skipped
    rounds: Rounds | None = None  # what was written since the last of them is all that is read
    wait_quiet: float = 0.0  # seconds in which to retry a checkpoint that something passing prevents


@dataclass(frozen=True)
class CheckpointResult:
    """A checkpoint that was made, and what it cost."""

    manifest: Manifest
    frozen_s: float
    phases: dict[str, float]
    closed: list[dict[str, object]]
    hooks: list[dict[str, Any]]
    stopped_at: float  # CLOCK_BOOTTIME: it stands still from then on
    printed_at: float  # its last output before that; 0: none on this host
    proof: Proof

    def to_json(self) -> dict[str, Any]:
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
    """How many chunks it is made of, and how many of them were in the store already: shared with earlier checkpoints,
    its own or another session's."""
    total, new = manifest.sizes["chunks"], manifest.sizes["new_chunks"]
    return {"total": total, "new": new, "shared": total - new}
