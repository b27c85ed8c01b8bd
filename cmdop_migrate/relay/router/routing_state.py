"""Define the router's state: connections, channels, routes. Decides nothing but the arithmetic of flow control."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cmdop_migrate.relay.credentials import Claims


@dataclass(slots=True)
class Flow:
    """Represent one direction of a channel: the credit of its sender, and the number of its next frame."""

    window: int
    credit: int
    seq: int = 0

    def take(self, seq: int, size: int) -> bool:
        """Return whether a frame may pass, in order and within the credit; use the credit up if so."""
        if seq != self.seq or size > self.credit:
            return False
        self.seq += 1
        self.credit -= size
        return True

    def give(self, count: int) -> bool:
        """Return whether the receiver may grant this credit, never more than it has received; add it if so."""
        if self.credit + count > self.window:
            return False
        self.credit += count
        return True


@dataclass(slots=True, eq=False)
class Channel:
    """Represent a client's channel to a session. `host` is None while no host has the session."""

    client: int
    number: int
    session: str
    opening: bytes
    to_host: Flow
    to_client: Flow
    host: int | None = None
    host_number: int = 0
    token: int = 0


@dataclass(slots=True)
class Budget:
    """Represent a token bucket of requests: a burst of `most`, and `refill` more per second."""

    most: float
    refill: float
    left: float
    at: float

    def spend(self, now: float) -> bool:
        """Return whether a request is allowed; count it if so."""
        self.left = min(self.most, self.left + max(0.0, now - self.at) * self.refill)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


@dataclass(slots=True, eq=False)
class Client:
    """Represent a client's connection."""

    conn: int
    claims: Claims
    budget: Budget
    channels: dict[int, Channel] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Host:
    """Represent a host's connection. `sessions`: the registered ones. `channels`: by the relay's numbers."""

    conn: int
    claims: Claims
    sessions: set[str] = field(default_factory=set)
    channels: dict[int, Channel] = field(default_factory=dict)
    last: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """Represent a REGISTER that waits for the lease store's answer."""

    conn: int
    token: int
    name: str
    state: str
    info: dict[str, Any]


@dataclass(slots=True, eq=False)
class Route:
    """Represent the reachable incarnation. `confirmed`: when the question was asked that the store confirmed."""

    conn: int
    host: str
    token: int
    state: str
    info: dict[str, Any]
    confirmed: float
    ttl: float
    channels: dict[tuple[int, int], Channel] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Entry:
    """Represent a session as the relay knows it. `highest`: no lower fencing token is ever routed. `asking`: what
    waits for the pending question (None: no question); `later`: what waits for the next one, because the pending
    question may be older than they are."""

    session: str
    name: str | None = None
    kept: str | None = None
    highest: int = 0
    state: str = "waiting"
    to: str = ""
    route: Route | None = None
    waiting: dict[tuple[int, int], Channel] = field(default_factory=dict)
    asked: float = float("-inf")
    asking: list[Claim | Channel] | None = None
    later: list[Claim | Channel] = field(default_factory=list)

    @property
    def in_use(self) -> bool:
        """Return whether the session has a route, a waiting channel or a pending question."""
        return self.route is not None or bool(self.waiting) or self.asking is not None
