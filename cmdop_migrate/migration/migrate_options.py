"""Define the options and the result of a migration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cmdop_migrate.snapshot.checkpoint_options import CheckpointResult


@dataclass(frozen=True)
class MigrateOptions:
    """Hold what the caller of a migration asked for."""

    pre_ship: int = 0  # pre-copy rounds
    lazy: bool = False
    accept: tuple[str, ...] = ()  # checks of the plan whose blockers are only warnings
    wait_quiet: float = 0.0  # seconds to wait for blockers that pass by themselves


@dataclass(frozen=True)
class Downtime:
    """Measure how long a session printed nothing: from its last output, or the freeze, until its first output on the
    target, or its first instruction there."""

    seconds: float
    basis: str
    until: str


@dataclass(frozen=True)
class MigrationResult:
    """Describe a finished migration. `frozen_s` and `downtime` are None if the connection to the target broke and
    nothing was measured."""

    migration: str
    session: str
    name: str
    source: str
    target: str
    token: int
    shipped: CheckpointResult
    frozen_s: float | None
    downtime: Downtime | None
    phases: dict[str, float]
    hooks: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    took_s: float

    @property
    def downtime_s(self) -> float | None:
        """Return the seconds in which the session printed nothing."""
        return self.downtime.seconds if self.downtime is not None else None

    def to_json(self) -> dict[str, Any]:
        """Return what `migrate --json` prints."""
        downtime = self.downtime
        return {
            "migration": self.migration,
            "session": self.session,
            "name": self.name,
            "from": self.source,
            "to": self.target,
            "token": self.token,
            "checkpoint": self.shipped.manifest.checkpoint,
            "frozen_s": self.frozen_s,
            "downtime_s": self.downtime_s,
            "downtime": {"from": downtime.basis, "until": downtime.until} if downtime is not None else None,
            "phases": self.phases,
            "bytes": self.shipped.to_json()["bytes"],
            "closed_connections": self.shipped.closed,
            "hooks": self.hooks,
            "warnings": self.warnings,
            "took_s": self.took_s,
        }
