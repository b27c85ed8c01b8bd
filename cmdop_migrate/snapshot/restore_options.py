"""Define the options and the result of a restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from cmdop_migrate.errors import PeerDiffers


@dataclass(frozen=True)
class RestoreOptions:
    """Hold what the caller of a restore asked for."""

    fork: str | None = None  # restore a copy under a new identity and this name
    lazy: bool = False
    allow_devices: bool = False
    wait: float = 0.0  # seconds to wait for a dead holder's lease to run out
    accept_files: bool = False


@dataclass(frozen=True)
class RestoreResult:
    """Describe a session that was restored and runs. The fields are those of `restore --json`."""

    session: str
    name: str
    host: str
    token: int
    checkpoint: str
    phases: dict[str, float]
    pid: int
    parent: str | None
    carried: list[str]  # files of the old host that came from the image
    grown: list[str]  # files of this host that have only grown since the checkpoint
    accepted: list[str]  # files that differ or are missing here, accepted by --accept-files
    hooks: list[dict[str, Any]]
    took_s: float
    ran_at: float  # CLOCK_BOOTTIME of the host that restored it
    printed_at: float | None  # CLOCK_BOOTTIME there of its first output; None if it printed nothing yet

    def to_json(self) -> dict[str, Any]:
        """Return what `restore --json` prints."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RestoreResult:
        """Read what `to_json` returned, in another process or on another host. Fields of a newer version are ignored.
        Raises PeerDiffers if a field is missing."""
        try:
            return cls(**{field.name: data[field.name] for field in fields(cls)})
        except KeyError as error:
            raise PeerDiffers(f"the result of a restore has no field {error}", "Update both hosts.") from error
