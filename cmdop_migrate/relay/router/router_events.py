"""Define the events that the router handles and the actions that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from cmdop_migrate.relay.credentials import Claims
from cmdop_migrate.relay.frames import Frame


@dataclass(frozen=True, slots=True)
class Limits:
    """Limit what one bearer may cost. `window`: bytes in flight in each direction of a channel; `beat`: seconds
    between heartbeats; `requests`: OPENs and LISTs that a client may make in a burst; `refill`: how many more each
    second."""

    window: int = 256 << 10
    beat: float = 10.0
    client_connections: int = 64
    host_connections: int = 4
    channels: int = 64
    sessions: int = 5000
    remembered: int = 20_000
    requests: float = 256.0
    refill: float = 32.0


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """Represent the state of a session's lease. `over`: the session has ended and has no checkpoint to restore."""

    token: int
    state: Literal["held", "parked", "free"]
    host: str
    ttl: float
    over: bool = False
    name: str | None = None


# unknown: there is no such session. silent: the store did not answer.
Answer = LeaseStatus | Literal["unknown", "silent"]


@dataclass(frozen=True, slots=True)
class Joined:
    """Report that a connection was admitted."""

    conn: int
    claims: Claims


@dataclass(frozen=True, slots=True)
class Received:
    """Report that a frame arrived."""

    conn: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Left:
    """Report that the connection has ended, for any reason. It is the last event of this connection."""

    conn: int


@dataclass(frozen=True, slots=True)
class Answered:
    """Report the answer to the one pending Ask for this session."""

    session: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class NotKept:
    """Report that a Keep has failed."""

    session: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""


Event = Joined | Received | Left | Answered | NotKept | Ticked


@dataclass(frozen=True, slots=True)
class Send:
    """Send a frame."""

    conn: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class End:
    """Send REFUSED with this reason, then end the connection; `Left` follows."""

    conn: int
    code: str
    why: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the lease store about a session, once; with `named`, also for the name that was kept."""

    session: str
    named: bool


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep a session's name in the store: the next relay must know it before a host registers the session."""

    session: str
    name: str


@dataclass(frozen=True, slots=True)
class Note:
    """Record an event and count it in the metrics. Contains no secret."""

    event: str
    session: str
    facts: dict[str, Any] = field(default_factory=dict)


Action = Send | End | Ask | Keep | Note
