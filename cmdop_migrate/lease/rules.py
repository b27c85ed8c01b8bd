"""Decide who may run a session: (record, request, observation, now) -> decision. Pure, and the same for all backends.

A decision is about one record as it was read; what it grants must be written by compare-and-swap against exactly that
record, or it is void. Times are of the requesting host's own CLOCK_BOOTTIME; the margins and their proof are in
margins.py. The token of a record is the fencing token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Final

from cmdop_migrate.lease.margins import contender_wait
from cmdop_migrate.lease.record import LeaseRecord


class AnyCheckpoint(Enum):
    """Provide one value, distinct from every checkpoint id and from None."""

    ANY = "any"


ANY: Final = AnyCheckpoint.ANY
FIRST_TOKEN: Final = 1


class Why(StrEnum):
    """Name why a lease was not granted, or is no longer ours."""

    HELD = "held"  # another incarnation holds it
    SUPERSEDED = "superseded"  # a higher token was issued
    PARKED = "parked"  # it was parked under our token
    FREED = "freed"  # it was released under our token
    CHECKPOINT = "checkpoint"  # the lease is at another checkpoint than the expected one
    GONE = "gone"  # no record, or one of a lower token: records were removed from the store


@dataclass(frozen=True, slots=True)
class Grant:
    """Grant the request, provided that this record replaces the one that was read."""

    record: LeaseRecord


@dataclass(frozen=True, slots=True)
class Already:
    """Report that the record already says what was requested: an earlier try of ours took effect."""

    record: LeaseRecord


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask to wait `seconds` more on the requesting host's clock, provided that the record stays as it is."""

    seconds: float
    holder: LeaseRecord


@dataclass(frozen=True, slots=True)
class Lost:
    """Deny the request. `holder` is the record that says so."""

    session: str
    why: Why
    holder: LeaseRecord | None

    def __str__(self) -> str:
        if self.holder is None:
            return f"the lease store has no record of {self.session}"
        at = f"{self.session}: {self.holder.state}"
        who = f"{self.holder.host} (token {self.holder.token})"
        checkpoint = f", checkpoint {self.holder.checkpoint}" if self.holder.checkpoint else ""
        return f"{at} by {who}{checkpoint}"


@dataclass(frozen=True, slots=True)
class Observation:
    """Record that a contender saw this record, and since when, on its own CLOCK_BOOTTIME. Valid for one boot: never
    stored.

    `since` is read after the answer arrived: what an answer shows may have been written after the request.
    """

    token: int
    renewals: int
    nonce: str
    since: float


@dataclass(frozen=True, slots=True)
class AcquireRequest:
    """Request a lease.

    `expect_checkpoint`: only if the lease is at this checkpoint. `resume_token`: only if this instance already holds it
    under this token; no new token is issued then. `above`: the highest token the requesting host has seen elsewhere (a
    manifest, its own disk), so that a store restored from a backup cannot make tokens shrink.
    """

    session: str
    host: str
    instance: str
    ttl: float
    expect_checkpoint: str | AnyCheckpoint | None = ANY
    resume_token: int | None = None
    above: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """Identify a holder: the session, its installation and its fencing token."""

    session: str
    instance: str
    token: int


def observe(record: LeaseRecord | None, earlier: Observation | None, now: float) -> Observation | None:
    """Return the observation after `record` was read: unchanged if the record is, else starting anew. Return None if
    the lease is not held."""
    if record is None or record.state != "held":
        return None
    seen = Observation(record.token, record.renewals, record.nonce, now)
    if earlier is not None and earlier.since <= now and replace(earlier, since=now) == seen:
        return earlier
    return seen


def acquire(
    record: LeaseRecord | None,
    request: AcquireRequest,
    observation: Observation | None,
    now: float,
    nonce: str,
    lapsed: bool = False,
) -> Grant | Wait | Lost:
    """Decide whether this host may run the session. `lapsed`: the backend itself knows that the time of this very
    record is over."""
    if request.resume_token is not None:
        return _resume(record, request, request.resume_token, nonce)
    if request.expect_checkpoint is not ANY and (record.checkpoint if record else None) != request.expect_checkpoint:
        return Lost(request.session, Why.CHECKPOINT, record)
    if record is not None and record.state == "held" and not lapsed:
        left = _wait_left(record, observation, now)
        if left > 0:
            return Wait(left, record)
    return Grant(
        LeaseRecord(
            session=request.session,
            token=max(record.token if record else 0, request.above) + 1,
            state="held",
            host=request.host,
            instance=request.instance,
            ttl=request.ttl,
            renewals=0,
            checkpoint=record.checkpoint if record else None,
            nonce=nonce,
        )
    )


def renew(record: LeaseRecord | None, claim: Claim, nonce: str) -> Grant | Lost:
    """Continue under the same token. Also past the TTL, as long as no other host took over."""
    lost = _not_ours(record, claim)
    if lost is not None or record is None:
        return lost or Lost(claim.session, Why.GONE, None)
    return Grant(replace(record, renewals=record.renewals + 1, nonce=nonce))


def commit_checkpoint(record: LeaseRecord | None, claim: Claim, checkpoint: str, nonce: str) -> Grant | Lost:
    """Renew, and make `checkpoint` the one that a restore starts from."""
    decision = renew(record, claim, nonce)
    if isinstance(decision, Grant):
        return Grant(replace(decision.record, checkpoint=checkpoint))
    return decision


def park(record: LeaseRecord | None, claim: Claim, checkpoint: str, nonce: str) -> Grant | Already | Lost:
    """Make `checkpoint` the only form of the session; the next acquire is granted immediately."""
    if record is not None and _is_end_of(record, claim, "parked") and record.checkpoint == checkpoint:
        return Already(record)
    lost = _not_ours(record, claim)
    if lost is not None or record is None:
        return lost or Lost(claim.session, Why.GONE, None)
    return Grant(replace(record, state="parked", checkpoint=checkpoint, nonce=nonce))


def release(record: LeaseRecord | None, claim: Claim, keep_checkpoint: bool, nonce: str) -> Grant | Already | Lost:
    """Free the lease: no host runs the session. Without `keep_checkpoint` it ended, and there is nothing to restore."""
    if record is not None and _is_end_of(record, claim, "free"):
        return Already(record)
    lost = _not_ours(record, claim)
    if lost is not None or record is None:
        return lost or Lost(claim.session, Why.GONE, None)
    return Grant(replace(record, state="free", checkpoint=record.checkpoint if keep_checkpoint else None, nonce=nonce))


def expire_fork(
    record: LeaseRecord | None, session: str, initial: str, most: int, nonce: str
) -> Grant | Already | Lost:
    """End a fork that never ran. Its first lease is at its initial checkpoint, `initial`, or not even there yet, and
    was renewed at most `most` times: the host that was to run it renews once more before it starts, and is refused from
    now on."""
    if record is None:
        return Lost(session, Why.GONE, None)
    if record.state == "free" and record.checkpoint is None:
        return Already(record)
    never_ran = record.state == "held" and record.token == FIRST_TOKEN and record.checkpoint in (None, initial)
    if not never_ran or record.renewals > most:
        return Lost(session, Why.HELD, record)
    return Grant(replace(record, state="free", checkpoint=None, nonce=nonce))


def break_held(record: LeaseRecord | None, request: AcquireRequest, nonce: str) -> Grant | Already | Lost:
    """Take the lease from its holder immediately, on a person's word that the holder is dead. The token grows, so a
    live holder is notified, and the relay drops it; until it is notified, two copies may run. That is the risk."""
    if record is None:
        return Lost(request.session, Why.GONE, None)
    if record.state != "held":
        return Already(record)
    return Grant(
        replace(
            record,
            token=max(record.token, request.above) + 1,
            state="parked" if record.checkpoint else "free",
            host=request.host,
            instance=request.instance,
            renewals=0,
            nonce=nonce,
        )
    )


def _resume(record: LeaseRecord | None, request: AcquireRequest, token: int, nonce: str) -> Grant | Lost:
    lost = _not_ours(record, Claim(request.session, request.instance, token))
    if lost is not None or record is None:
        return lost or Lost(request.session, Why.GONE, None)
    if request.expect_checkpoint is not ANY and record.checkpoint != request.expect_checkpoint:
        return Lost(request.session, Why.CHECKPOINT, record)
    renewed = replace(record, renewals=record.renewals + 1, nonce=nonce)
    # Never shorter: the process that runs the session may still rely on the longer TTL.
    return Grant(replace(renewed, host=request.host, ttl=max(record.ttl, request.ttl)))


def _wait_left(record: LeaseRecord, observation: Observation | None, now: float) -> float:
    whole = contender_wait(record.ttl)
    known = observe(record, observation, now)
    return whole if known is None else whole - (now - known.since)


def _not_ours(record: LeaseRecord | None, claim: Claim) -> Lost | None:
    if record is None or record.token < claim.token:
        return Lost(claim.session, Why.GONE, record)
    if record.token > claim.token or record.instance != claim.instance:
        return Lost(claim.session, Why.SUPERSEDED, record)
    if record.state != "held":
        return Lost(claim.session, Why.PARKED if record.state == "parked" else Why.FREED, record)
    return None


def _is_end_of(record: LeaseRecord, claim: Claim, state: str) -> bool:
    return record.state == state and record.token == claim.token and record.instance == claim.instance
