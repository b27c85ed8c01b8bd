"""What the switchboard hears and what it wants done. Values only; numbers of connections are the server's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from cmdop_migrate.relay.credentials import Claims
from cmdop_migrate.relay.frames import Frame


@dataclass(frozen=True, slots=True)
class Limits:
    """What one bearer may cost. `window`: bytes a channel may have under way each way; `beat`: seconds between signs of
    life; `requests`: how many OPENs and LISTs a client may make at once, and `refill` how many more each second."""

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
class Standing:
    """What the lease store says of a session. `over`: it ended, and nothing can bring it back."""

    token: int
    state: Literal["held", "parked", "free"]
    host: str
    ttl: float
    over: bool = False
    name: str | None = None


# unknown: there is no such session. silent: the store did not say.
Answer = Standing | Literal["unknown", "silent"]


@dataclass(frozen=True, slots=True)
class Joined:
    """A bearer was admitted."""

    conn: int
    claims: Claims


@dataclass(frozen=True, slots=True)
class Received:
    conn: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Left:
    """The connection is over, for whatever reason. Nothing is heard of it after this."""

    conn: int


@dataclass(frozen=True, slots=True)
class Answered:
    """To the one Ask for this session that was under way."""

    session: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class NotKept:
    """A Keep that failed."""

    session: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""


Event = Joined | Received | Left | Answered | NotKept | Ticked


@dataclass(frozen=True, slots=True)
class Send:
    conn: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class End:
    """Say REFUSED with this, then end the connection; `Left` follows."""

    conn: int
    code: str
    why: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the lease store about a session, once. Its name too, where that is kept, when `named`."""

    session: str
    named: bool


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep a session's name in the store: the next relay must know it before a host tells it."""

    session: str
    name: str


@dataclass(frozen=True, slots=True)
class Note:
    """For the record and the figures. Holds no secret."""

    event: str
    session: str
    facts: dict[str, Any] = field(default_factory=dict)


Action = Send | End | Ask | Keep | Note
