"""Define the frozen values that move between layers."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from cmdop_migrate.errors import Usage

State = Literal["running", "frozen", "fenced", "checkpointing", "parked", "restoring", "exited"]
# handing: it is frozen here while another host restores it; only the lease says which of the two copies may run.
Phase = Literal["starting", "live", "handing", "parked", "restoring", "exited"]
NetMode = Literal["private", "host"]
ExitKind = Literal[
    "exited", "killed", "moved", "superseded", "holder_died", "parking_unknown", "not_parked", "kill_pending"
]

RECORD_VERSION = 1
PROTOCOL = 1
# What two hosts must agree on: it grows when the meaning of what hosts say to each other changes.
_ID = re.compile(r"[0-9a-f]{24}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def session_name(text: str) -> str:
    """Return the name. Raise Usage if it is not valid: names end up in paths and on screens."""
    if not _NAME.fullmatch(text):
        shown = text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
        raise Usage(
            f"not a session name: {shown!r}",
            "Start with a letter or digit; then letters, digits, '.', '_' or '-'; at most 63 in all.",
        )
    return text


def new_session_id() -> str:
    """Return a new, permanent session id: 96 random bits, so that no two hosts ever make the same one."""
    return os.urandom(12).hex()


def is_session_id(text: str) -> bool:
    """Return whether `text` has the form of a session id."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True)
class Spec:
    """Describe what a user asked a session to be."""

    command: tuple[str, ...]
    cwd: str
    user: str
    env: tuple[tuple[str, str], ...]
    net: NetMode = "private"
    shares: tuple[str, ...] = ()
    hooks: tuple[tuple[str, str], ...] = ()  # (event, executable on the host that the session is on)
    gate: str | None = None  # the gate asked before a line is committed, instead of the host's own


@dataclass(frozen=True)
class Link:
    """Name the two ends of a private network: `address` inside, `gateway` on the host's veth."""

    veth: str
    address: str
    gateway: str
    prefix: int


@dataclass(frozen=True)
class Exit:
    """Describe how a session ended on this host. Programs compare `kind`; `reason` is shown to people and never parsed.

    exited           by itself; `code` is its exit status
    killed           by a signal; `code` is 128 + the signal's number, as a shell reports it
    moved            it runs on the host `to` under the fencing token `token`: this host migrated it there
    superseded       another incarnation took over: on the host `to`, under the fencing token `token`
    holder_died      its holder process died, and the session with it
    parking_unknown  its processes were killed while a checkpoint was committed: only its lease says if it is parked
    not_parked       the same, after its lease said that it is not parked
    kill_pending     a user killed it while a checkpoint was committed: its lease is still to be ended
    """

    code: int | None
    reason: str
    at: float
    kind: ExitKind
    to: str | None = None
    token: int | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Exit:
        """Return the Exit in `data`, also if a version without `kind` wrote it. Raise TypeError or ValueError if
        `data` holds none."""
        if "kind" not in data:
            kind, to, token = _kind_of_old_reason(str(data["reason"]))
            return cls(**data, kind=kind, to=to, token=token)
        if data["kind"] not in get_args(ExitKind):
            raise ValueError(f"unknown kind of exit: {data['kind']!r}")
        return cls(**data)


def exit_kind(message: dict[str, Any]) -> ExitKind:
    """Return the kind of end that a holder's `exit` event tells, also if an older version started the holder."""
    kind: ExitKind = message.get("kind") or _kind_of_old_reason(str(message.get("reason", "")))[0]
    return kind


# The reasons that versions without Exit.kind wrote. They are on disks: do not change them with the texts of today.
_OLD_REASONS: dict[str, ExitKind] = {
    "its holder died": "holder_died",
    "it ended while it was being parked": "parking_unknown",
    "it ended before it was parked": "not_parked",
    "killed; its lease has not heard of it yet": "kill_pending",
}
_OLD_MOVED = re.compile(r"moved to (?P<to>\S+)(?: \(token (?P<token>\d+)\))?")
_OLD_SUPERSEDED = re.compile(r"superseded by token (?P<token>\d+) on (?P<to>\S+)")


def _kind_of_old_reason(reason: str) -> tuple[ExitKind, str | None, int | None]:
    if match := _OLD_MOVED.match(reason):
        return "moved", match["to"], int(match["token"]) if match["token"] else None
    if match := _OLD_SUPERSEDED.match(reason):
        return "superseded", match["to"], int(match["token"])
    if reason in _OLD_REASONS:
        return _OLD_REASONS[reason], None, None
    return "killed" if reason.startswith("killed") else "exited", None, None


@dataclass(frozen=True)
class Record:
    """Describe one session on one host, as its directory keeps it. The holder's lock, not the record, says whether it
    lives."""

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
        """Return the record in `data`. Raise KeyError, TypeError or ValueError if that is no record of this version."""
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
                "exit": Exit.from_json(data["exit"]) if data["exit"] else None,
            }
        )
