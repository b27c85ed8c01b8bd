"""The values that move between layers. Frozen; plain data in, plain data out."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cmdop_migrate.errors import Usage

State = Literal["running", "frozen", "fenced", "checkpointing", "parked", "restoring", "exited"]
# handing: it stands still here while another host restores it; only the lease says which of the two goes on.
Phase = Literal["starting", "live", "handing", "parked", "restoring", "exited"]
NetMode = Literal["private", "host"]

RECORD_VERSION = 1
PROTOCOL = 1
"""What two hosts must agree on: grows when what one host says to another, or is told by it, changes its meaning."""
_ID = re.compile(r"[0-9a-f]{24}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def session_name(text: str) -> str:
    """The name itself, or Usage: names end up in paths and on screens."""
    if not _NAME.fullmatch(text):
        shown = text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
        raise Usage(
            f"not a session name: {shown!r}",
            "Start with a letter or digit; then letters, digits, '.', '_' or '-'; at most 63 in all.",
        )
    return text


def new_session_id() -> str:
    """Identity of a session, for ever: 96 random bits, so no two hosts ever make the same."""
    return os.urandom(12).hex()


def is_session_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True)
class Spec:
    """What a session was asked to be."""

    command: tuple[str, ...]
    cwd: str
    user: str
    env: tuple[tuple[str, str], ...]
    net: NetMode = "private"
    shares: tuple[str, ...] = ()
    hooks: tuple[tuple[str, str], ...] = ()  # (event, executable on whatever host it is on)
    gate: str | None = None  # who is asked before a line is committed, instead of the host's own


@dataclass(frozen=True)
class Link:
    """A private network's two ends: `address` inside, `gateway` on the host's veth."""

    veth: str
    address: str
    gateway: str
    prefix: int


@dataclass(frozen=True)
class Exit:
    """How a session ended. `reason` is for people; `code` as a shell would say it (128 + signal)."""

    code: int | None
    reason: str
    at: float


@dataclass(frozen=True)
class Record:
    """One session on one host, as kept in its directory. The holder's lock says whether it lives."""

    session: str
    name: str
    host: str
    token: int
    phase: Phase
    spec: Spec
    created: float
    layers: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    link: Link | None = None
    pid: int | None = None
    exit: Exit | None = None
    parent: str | None = None
    checkpoint: str | None = None
    version: int = field(default=RECORD_VERSION)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """Raises KeyError, TypeError or ValueError on anything that is not a record of this version."""
        if data["version"] != RECORD_VERSION:
            raise ValueError(f"record version {data['version']}, this program knows {RECORD_VERSION}")
        spec = dict(data["spec"])
        return cls(
            **{
                **data,
                "spec": Spec(
                    **{
                        **spec,
                        "command": tuple(spec["command"]),
                        "env": tuple((str(k), str(v)) for k, v in spec["env"]),
                        "shares": tuple(spec["shares"]),
                        "hooks": tuple((str(event), str(path)) for event, path in spec.get("hooks", ())),
                    }
                ),
                "layers": tuple(data["layers"]),
                "binds": tuple(data["binds"]),
                "link": Link(**data["link"]) if data["link"] else None,
                "exit": Exit(**data["exit"]) if data["exit"] else None,
            }
        )
