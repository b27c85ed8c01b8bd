"""Who may run a session: (record, request, observation, now) -> decision. Pure, and the same for all backends.

A decision is about one record as it was read; what it grants must be written by
compare-and-swap against exactly that record, or it is void. Times are of the
asker's own CLOCK_BOOTTIME; the margins and their proof are in margins.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Final

from cmdop_migrate.lease.margins import contender_wait
from cmdop_migrate.lease.record import LeaseRecord


class AnyCheckpoint(Enum):
    """One value, distinct from every checkpoint id and from None."""

    ANY = "any"


ANY: Final = AnyCheckpoint.ANY
FIRST_TOKEN: Final = 1


class Why(StrEnum):
    """Why a lease was not granted, or is no longer ours."""

    HELD = "held"  # another incarnation holds it
    SUPERSEDED = "superseded"  # a higher token was given out
    PARKED = "parked"  # under our token it was parked
    FREED = "freed"  # under our token it was released
    CHECKPOINT = "checkpoint"  # the lease stands at another checkpoint than the expected one
    GONE = "gone"  # no record, or one of a lower token: someone removed records from the store


@dataclass(frozen=True, slots=True)
class Grant:
    """Yes, if this record replaces the one that was read."""

    record: LeaseRecord


@dataclass(frozen=True, slots=True)
class Already:
    """What was asked for is what the record says: an earlier try of ours took effect."""

    record: LeaseRecord


@dataclass(frozen=True, slots=True)
class Wait:
    """Not before `seconds` more on the asker's clock, if the record stays as it is."""

    seconds: float
    holder: LeaseRecord


@dataclass(frozen=True, slots=True)
class Lost:
    """No. `holder` is the record that says so."""

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
    """That a contender saw this record, and since when, on its own CLOCK_BOOTTIME. Of one boot: never stored.

    `since` is read after the answer has come: what an answer shows may have been written after the question."""

    token: int
    renewals: int
    nonce: str
    since: float


@dataclass(frozen=True, slots=True)
class AcquireRequest:
    """A request to acquire.

    `expect_checkpoint`: only if the lease stands at this checkpoint. `resume_token`: only if this instance holds it
    under this token already; a new token is not given then. `above`: the highest token the asker has seen elsewhere
    (a manifest, its own disk), so that a store put back from a backup cannot make tokens shrink.
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
    """What a holder says of itself."""

    session: str
    instance: str
    token: int


def observe(record: LeaseRecord | None, before: Observation | None, now: float) -> Observation | None:
    """What is known now that `record` was read. None when nobody holds it. Any change begins anew."""
    if record is None or record.state != "held":
        return None
    seen = Observation(record.token, record.renewals, record.nonce, now)
    if before is not None and before.since <= now and replace(before, since=now) == seen:
        return before
    return seen


def acquire(
    record: LeaseRecord | None,
    wanted: AcquireRequest,
    observation: Observation | None,
    now: float,
    nonce: str,
    lapsed: bool = False,
) -> Grant | Wait | Lost:
    """May this host run it? `lapsed`: the backend itself knows that the time of this very record is over."""
    if wanted.resume_token is not None:
        return _resume(record, wanted, wanted.resume_token, nonce)
    if wanted.expect_checkpoint is not ANY and (record.checkpoint if record else None) != wanted.expect_checkpoint:
        return Lost(wanted.session, Why.CHECKPOINT, record)
    if record is not None and record.state == "held" and not lapsed:
        left = _wait_left(record, observation, now)
        if left > 0:
            return Wait(left, record)
    return Grant(
        LeaseRecord(
            session=wanted.session,
            token=max(record.token if record else 0, wanted.above) + 1,
            state="held",
            host=wanted.host,
            instance=wanted.instance,
            ttl=wanted.ttl,
            renewals=0,
            checkpoint=record.checkpoint if record else None,
            nonce=nonce,
        )
    )


def renew(record: LeaseRecord | None, claim: Claim, nonce: str) -> Grant | Lost:
    """Go on under the same token. Also past the TTL, as long as nobody took over."""
    lost = _not_ours(record, claim)
    if lost is not None or record is None:
        return lost or Lost(claim.session, Why.GONE, None)
    return Grant(replace(record, renewals=record.renewals + 1, nonce=nonce))


def commit_checkpoint(record: LeaseRecord | None, claim: Claim, checkpoint: str, nonce: str) -> Grant | Lost:
    """Go on, and from now on `checkpoint` is what a restore begins from."""
    decision = renew(record, claim, nonce)
    if isinstance(decision, Grant):
        return Grant(replace(decision.record, checkpoint=checkpoint))
    return decision


def park(record: LeaseRecord | None, claim: Claim, checkpoint: str, nonce: str) -> Grant | Already | Lost:
    """The session exists only as `checkpoint` from now on; the next acquire is granted at once."""
    if record is not None and _is_end_of(record, claim, "parked") and record.checkpoint == checkpoint:
        return Already(record)
    lost = _not_ours(record, claim)
    if lost is not None or record is None:
        return lost or Lost(claim.session, Why.GONE, None)
    return Grant(replace(record, state="parked", checkpoint=checkpoint, nonce=nonce))


def release(record: LeaseRecord | None, claim: Claim, keep_checkpoint: bool, nonce: str) -> Grant | Already | Lost:
    """Nobody runs it. Without `keep_checkpoint` there is nothing to restore it from either: it ended."""
    if record is not None and _is_end_of(record, claim, "free"):
        return Already(record)
    lost = _not_ours(record, claim)
    if lost is not None or record is None:
        return lost or Lost(claim.session, Why.GONE, None)
    return Grant(replace(record, state="free", checkpoint=record.checkpoint if keep_checkpoint else None, nonce=nonce))


def expire_fork(record: LeaseRecord | None, session: str, birth: str, most: int, nonce: str) -> Grant | Already | Lost:
    """End a branch that never ran. Its first lease stands at the checkpoint it was to begin with, `birth`, or not even
    there yet, and was renewed `most` times at most: whoever was to run it renews once more before that, and is refused
    from now on."""
    if record is None:
        return Lost(session, Why.GONE, None)
    if record.state == "free" and record.checkpoint is None:
        return Already(record)
    unborn = record.state == "held" and record.token == FIRST_TOKEN and record.checkpoint in (None, birth)
    if not unborn or record.renewals > most:
        return Lost(session, Why.HELD, record)
    return Grant(replace(record, state="free", checkpoint=None, nonce=nonce))


def break_held(record: LeaseRecord | None, wanted: AcquireRequest, nonce: str) -> Grant | Already | Lost:
    """Take it from whoever holds it, at once, on a person's word that the holder is dead. The token grows, so a
    holder that lives is told, and the relay drops it; until it is told, two may run. That is the risk."""
    if record is None:
        return Lost(wanted.session, Why.GONE, None)
    if record.state != "held":
        return Already(record)
    return Grant(
        replace(
            record,
            token=max(record.token, wanted.above) + 1,
            state="parked" if record.checkpoint else "free",
            host=wanted.host,
            instance=wanted.instance,
            renewals=0,
            nonce=nonce,
        )
    )


def _resume(record: LeaseRecord | None, wanted: AcquireRequest, token: int, nonce: str) -> Grant | Lost:
    lost = _not_ours(record, Claim(wanted.session, wanted.instance, token))
    if lost is not None or record is None:
        return lost or Lost(wanted.session, Why.GONE, None)
    if wanted.expect_checkpoint is not ANY and record.checkpoint != wanted.expect_checkpoint:
        return Lost(wanted.session, Why.CHECKPOINT, record)
    renewed = replace(record, renewals=record.renewals + 1, nonce=nonce)
    # Never shorter: what was promised for the longer time may still be relied on by the one who runs it.
    return Grant(replace(renewed, host=wanted.host, ttl=max(record.ttl, wanted.ttl)))


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
