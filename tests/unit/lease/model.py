"""Model two hosts and one register, small enough to walk through every order of their steps.

A step is the sending, the effect or the answer of one request, the loss of an answer, or the passing of half a
TTL; events between two steps of a host (a freeze, a slow network, a pause of the process) are steps of others
and time in between. Clocks run at fixed rates. What the hosts decide is decided by the real rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from cmdop_migrate.lease import rules
from cmdop_migrate.lease.margins import freeze_allowance, fresh_for
from cmdop_migrate.lease.record import LeaseRecord
from cmdop_migrate.lease.rules import AcquireRequest, Claim, Grant, Lost, Observation, Wait

TTL = 1.0
HALF = TTL / 2
EPSILON = 1e-9

Cell = tuple[LeaseRecord, int] | None


class Host(NamedTuple):
    """Describe one host, at one point of its program."""

    at: str = "idle"
    requests: int = 0
    sent: float = 0.0
    cell: Cell = None
    observation: Observation | None = None
    new: LeaseRecord | None = None
    expected: int | None = None
    swapped: bool = False
    lease: tuple[LeaseRecord, int, float] | None = None  # record, version, started

    def idle(self, **changes: Any) -> Host:
        """Drop the state of the last request, so that equivalent worlds are equal."""
        return Host(**({"requests": self.requests, "observation": self.observation, "lease": self.lease} | changes))

    def runs_until(self) -> float:
        """Return the latest time on its own clock at which it runs: its deadline, and the time it has for freezing."""
        if self.lease is None or self.at.startswith("end"):
            return float("-inf")
        return self.lease[2] + fresh_for(TTL) + freeze_allowance(TTL)


class World(NamedTuple):
    ticks: int
    cell: Cell
    hosts: tuple[Host, Host]


@dataclass(frozen=True)
class Model:
    """Walk all worlds. `since_sent` is the planted mistake of counting from the request; rates beyond RHO are the
    other."""

    rates: tuple[float, float]
    ticks: int = 5
    requests: tuple[int, int] = (2, 2)
    since_sent: bool = False

    def clock(self, world: World, who: int) -> float:
        return world.ticks * HALF * self.rates[who]

    def running(self, world: World) -> list[int]:
        return [who for who in (0, 1) if self.clock(world, who) < world.hosts[who].runs_until() - EPSILON]

    def walk(self) -> tuple[int, int, World | None]:
        """Return (worlds seen, takeovers seen, the first world in which both run)."""
        first = World(0, None, (Host(), Host()))
        seen, waiting, takeovers = {first}, [first], 0
        while waiting:
            world = waiting.pop()
            if len(self.running(world)) > 1:
                return len(seen), takeovers, world
            takeovers += world.cell is not None and world.cell[0].token > 1
            for after in self.steps(world):
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return len(seen), takeovers, None

    def steps(self, world: World) -> Iterator[World]:
        if world.ticks < self.ticks:
            yield world._replace(ticks=world.ticks + 1)
        for who in (0, 1):
            for host, cell in self.moves(world, who):
                hosts = (host, world.hosts[1]) if who == 0 else (world.hosts[0], host)
                yield World(world.ticks, cell, hosts)

    def moves(self, world: World, who: int) -> Iterator[tuple[Host, Cell]]:
        host, now, cell = world.hosts[who], self.clock(world, who), world.cell
        spare = host.requests < self.requests[who]
        match host.at:
            case "idle" if spare and host.lease is None:
                yield host._replace(at="asked", requests=host.requests + 1, sent=now), cell
            case "idle" if spare and host.lease is not None:
                yield self.renewing(host, now, host.lease[0], host.lease[1], who), cell
                yield self.ending(host, host.lease, who), cell
            case "asked":
                yield host._replace(at="answered", cell=cell), cell
            case "answered":
                yield self.decided(host, now, who), cell
            case "granted":  # a process may be stopped between deciding and sending
                yield host._replace(at="sent", sent=now), cell
            case "sent" | "end-sent":
                yield host._replace(at=host.at.replace("sent", "done"), swapped=False), self.swap(host, cell, False)
                ours = self.swap(host, cell, True)
                if ours is not cell:
                    yield host._replace(at=host.at.replace("sent", "done"), swapped=True), ours
            case "done":
                yield self.told(host, cell), cell
                yield host.idle(), cell  # the answer is lost, and so is what it said
            case "reread":
                yield self.renewed(host, now, who), cell
            case "end-done":
                yield host.idle(lease=None, observation=None), cell

    def swap(self, host: Host, cell: Cell, take: bool) -> Cell:
        """Apply a swap; `take` False is a request that never arrives, or is refused."""
        assert host.new is not None
        holds = (cell[1] if cell else None) == host.expected
        return (host.new, (cell[1] if cell else 0) + 1) if holds and take else cell

    def decided(self, host: Host, now: float, who: int) -> Host:
        record = host.cell[0] if host.cell else None
        observation = rules.observe(record, host.observation, host.sent if self.since_sent else now)
        name = "ab"[who]
        decision = rules.acquire(record, AcquireRequest("s", name, name, TTL), observation, now, _nonce(host, who))
        if isinstance(decision, Wait):
            return host.idle(observation=observation)
        assert isinstance(decision, Grant)
        expected = host.cell[1] if host.cell else None
        return host._replace(at="granted", observation=observation, cell=None, new=decision.record, expected=expected)

    def renewing(self, host: Host, now: float, record: LeaseRecord, version: int, who: int) -> Host:
        decision = rules.renew(
            record, Claim("s", "ab"[who], host.lease[0].token if host.lease else 0), _nonce(host, who)
        )
        assert isinstance(decision, Grant)
        return host._replace(
            at="sent", requests=host.requests + 1, sent=now, new=decision.record, expected=version, cell=None
        )

    def ending(self, host: Host, lease: tuple[LeaseRecord, int, float], who: int) -> Host:
        """Send an ending request; the session is frozen before."""
        decision = rules.release(lease[0], Claim("s", "ab"[who], lease[0].token), False, _nonce(host, who))
        assert isinstance(decision, Grant)
        return host._replace(at="end-sent", requests=host.requests + 1, new=decision.record, expected=lease[1])

    def told(self, host: Host, cell: Cell) -> Host:
        assert host.new is not None
        if host.swapped:
            version = (host.expected or 0) + 1
            return host.idle(lease=(host.new, version, host.sent), observation=None)
        if host.lease is None:
            return host.idle()
        return host._replace(at="reread", cell=cell, new=None)

    def renewed(self, host: Host, now: float, who: int) -> Host:
        assert host.lease is not None
        record = host.cell[0] if host.cell else None
        decision = rules.renew(record, Claim("s", "ab"[who], host.lease[0].token), _nonce(host, who))
        if isinstance(decision, Lost):
            return host.idle(lease=None)
        assert host.cell is not None
        if host.requests >= self.requests[who]:
            return host.idle()
        return self.renewing(host, now, host.cell[0], host.cell[1], who)


def _nonce(host: Host, who: int) -> str:
    return f"{who}{host.requests:015x}"
