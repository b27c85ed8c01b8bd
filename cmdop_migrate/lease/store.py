"""The lease store: the rules over any register.

"Lost the race" is a result. "Unreachable" is an exception, and after it nothing
is known: what was asked may have happened, or may yet. Any later *successful*
call for the session settles it, because the swaps of one session stand in one
order: a late write that expected an older version is refused for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cmdop_migrate import clock as clocks
from cmdop_migrate.errors import LeaseUnreachable, LeaseUnreadable
from cmdop_migrate.lease import rules
from cmdop_migrate.lease.margins import check_ttl, fresh_for
from cmdop_migrate.lease.record import LeaseRecord, check_checkpoint, check_instance, check_session, parse
from cmdop_migrate.lease.register import Cell, Register, Swap
from cmdop_migrate.lease.rules import ANY, AcquireRequest, Already, AnyCheckpoint, Claim, Grant, Lost, Observation, Wait

TRIES = 8  # swaps lost in a row to other writers of our own host (an agent and a command), before giving up


@dataclass(frozen=True, slots=True)
class Held:
    """The session is ours under `record.token`. `started`: CLOCK_BOOTTIME when the request that proved it began."""

    record: LeaseRecord
    version: str
    started: float

    @property
    def session(self) -> str:
        return self.record.session

    @property
    def token(self) -> int:
        return self.record.token

    @property
    def fresh_until(self) -> float:
        """Past this moment of CLOCK_BOOTTIME the session must stand still, unless renewed."""
        return self.started + fresh_for(self.record.ttl)


@dataclass(frozen=True, slots=True)
class Ended:
    """Parked or free, as `record` says; the holder has nothing any more."""

    record: LeaseRecord
    version: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Another holds it, and is not known to be gone. Ask again in `seconds`, with this observation."""

    observation: Observation | None
    seconds: float
    holder: LeaseRecord


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A lease as it stands. `observation` (None when nobody holds it) may be given to a later acquire on this host."""

    record: LeaseRecord
    version: str
    lapsed: bool
    observation: Observation | None


Renewed = Held | Lost | LeaseUnreachable | LeaseUnreadable
_Decide = Callable[[LeaseRecord | None, str], Grant | Already | Lost]


class LeaseStore:
    """All of it may be called from several threads and processes at once."""

    def __init__(self, register: Register, clock: Callable[[], float] = clocks.boottime) -> None:
        self.register = register
        self.url = register.url
        self._clock = clock

    def acquire(
        self,
        session: str,
        host: str,
        instance: str,
        ttl: float,
        *,
        observation: Observation | None = None,
        expect_checkpoint: str | AnyCheckpoint | None = ANY,
        resume_token: int | None = None,
        above: int = 0,
    ) -> Held | Waiting | Lost:
        """Take the lease under a new token, higher than every one before; with `resume_token`, go on under that one."""
        check_session(session)
        wanted = AcquireRequest(
            session,
            check_session(host),
            check_instance(instance),
            check_ttl(ttl),
            expect_checkpoint,
            resume_token,
            above,
        )
        cell = self.register.read(session)
        for _ in range(TRIES):
            now = self._clock()  # after the answer: see Observation
            record = _parsed(cell, session)
            observation = rules.observe(record, observation, now)
            decision = rules.acquire(record, wanted, observation, now, _nonce(), cell is not None and cell.lapsed)
            if isinstance(decision, Wait):
                return Waiting(observation, decision.seconds, decision.holder)
            if isinstance(decision, Lost):
                return decision
            started = self._clock()
            version, cell = self._swap(decision.record, cell.version if cell else None)
            if version is not None:
                return Held(decision.record, version, started)
        raise self._too_busy(session)

    def renew(self, lease: Held) -> Held | Lost:
        """Prove that it is still ours, and go on for another TTL from the start of this call."""
        claim = _claim(lease)
        return self._as_held(lease, lambda record, nonce: rules.renew(record, claim, nonce))

    def renew_many(self, leases: Sequence[Held]) -> list[Renewed]:
        """`renew` for each, in order, as fast as the backend can. A failure of one does not stop the others."""
        if self.register.batch > 1:
            size = self.register.batch
            parts = [leases[at : at + size] for at in range(0, len(leases), size)]
            return [answer for part in parts for answer in self._renew_batch(part)]
        if self.register.threads > 1 and len(leases) > 1:
            with ThreadPoolExecutor(min(self.register.threads, len(leases)), "lease") as pool:
                return list(pool.map(self._renew_or_error, leases))
        return [self._renew_or_error(lease) for lease in leases]

    def commit_checkpoint(self, lease: Held, checkpoint: str) -> Held | Lost:
        """From now on `checkpoint` is what a restore begins from. Refused by the store when superseded. Renews too."""
        check_checkpoint(checkpoint)
        claim = _claim(lease)
        return self._as_held(lease, lambda record, nonce: rules.commit_checkpoint(record, claim, checkpoint, nonce))

    def park(self, lease: Held, checkpoint: str) -> Ended | Lost:
        """The session exists only as `checkpoint` from now on. It must stand still already: another host may have it
        running before this returns. After LeaseUnreachable: a renew that answers Held proves that it was not parked
        and will not be; one that answers Lost(parked), that it was."""
        check_checkpoint(checkpoint)
        claim = _claim(lease)
        return self._as_ended(lease, lambda record, nonce: rules.park(record, claim, checkpoint, nonce))

    def release(self, lease: Held, *, keep_checkpoint: bool = False) -> Ended | Lost:
        """The session ended, and holds nothing any more. The token stays, so that it grows for ever. With
        `keep_checkpoint` the last checkpoint may still be restored under this identity."""
        claim = _claim(lease)
        return self._as_ended(lease, lambda record, nonce: rules.release(record, claim, keep_checkpoint, nonce))

    def expire_fork(self, session: str, birth: str, most: int) -> bool:
        """Whether a branch that never ran is over, and will not run: rules.expire_fork says which that is."""
        cell = self.register.read(check_session(session))
        for _ in range(TRIES):
            decision = rules.expire_fork(_parsed(cell, session), session, birth, most, _nonce())
            if not isinstance(decision, Grant):
                return isinstance(decision, Already)
            version, cell = self._swap(decision.record, cell.version if cell else None)
            if version is not None:
                return True
        raise self._too_busy(session)

    def inspect(self, session: str, observation: Observation | None = None) -> LeaseView | None:
        """The lease as it stands, or None when there never was one. Changes nothing."""
        cell = self.register.read(check_session(session))
        now = self._clock()
        record = _parsed(cell, session)
        if cell is None or record is None:
            return None
        return LeaseView(record, cell.version, cell.lapsed, rules.observe(record, observation, now))

    def sessions(self) -> Iterator[str]:
        """The sessions that have a lease, of whatever state."""
        return self.register.sessions()

    def force_break(self, session: str, host: str, instance: str, *, above: int = 0) -> Ended | Lost:
        """Take it from its holder at once: parked at its last checkpoint, or free. For a person who knows the holder
        is dead; if it is not, two may run until it is told. A record that cannot be read is replaced only with
        `above`, the highest token seen anywhere; one of a newer version never."""
        wanted = AcquireRequest(check_session(session), check_session(host), check_instance(instance), 1.0, above=above)
        cell = self.register.read(session)
        for _ in range(TRIES):
            decision = self._break_one(cell, wanted)
            if isinstance(decision, Lost):
                return decision
            if isinstance(decision, Already):
                return Ended(decision.record, cell.version if cell else "")
            version, cell = self._swap(decision.record, cell.version if cell else None)
            if version is not None:
                return Ended(decision.record, version)
        raise self._too_busy(session)

    def check(self) -> None:
        """For start-up: does it answer, and does it mean what it answers? BadConfig, LeaseUnreachable."""
        self.register.check()
        self.register.read("check")

    def close(self) -> None:
        self.register.close()

    def _break_one(self, cell: Cell | None, wanted: AcquireRequest) -> Grant | Already | Lost:
        try:
            return rules.break_held(_parsed(cell, wanted.session), wanted, _nonce())
        except LeaseUnreadable as error:
            if wanted.above == 0 or type(error) is not LeaseUnreadable:
                raise
        return Grant(
            LeaseRecord(
                wanted.session, wanted.above + 1, "free", wanted.host, wanted.instance, wanted.ttl, 0, None, _nonce()
            )
        )

    def _renew_batch(self, leases: Sequence[Held]) -> list[Renewed]:
        """One call for all; what it does not settle is settled one by one."""
        started = self._clock()
        records: list[LeaseRecord] = []
        for lease in leases:
            decision = rules.renew(lease.record, _claim(lease), _nonce())
            assert isinstance(decision, Grant)
            records.append(decision.record)
        swaps = [_as_swap(record, lease.version) for record, lease in zip(records, leases, strict=True)]
        results: list[Renewed] = []
        for answer, record, lease in zip(self.register.write_many(swaps), records, leases, strict=True):
            if isinstance(answer, str):
                results.append(Held(record, answer, started))
            elif answer is None:
                results.append(self._renew_or_error(lease))
            else:
                results.append(answer)
        return results

    def _renew_or_error(self, lease: Held) -> Renewed:
        try:
            return self.renew(lease)
        except (LeaseUnreachable, LeaseUnreadable) as error:
            return error

    def _as_held(self, lease: Held, decide: _Decide) -> Held | Lost:
        answer = self._change(lease, decide)
        if isinstance(answer, Lost):
            return answer
        record, version, started = answer
        return Held(record, version, started)

    def _as_ended(self, lease: Held, decide: _Decide) -> Ended | Lost:
        answer = self._change(lease, decide)
        return answer if isinstance(answer, Lost) else Ended(answer[0], answer[1])

    def _change(self, lease: Held, decide: _Decide) -> tuple[LeaseRecord, str, float] | Lost:
        """Swap what the holder knows; when that is no longer the record, read it and decide again."""
        record: LeaseRecord | None = lease.record
        version: str | None = lease.version
        for _ in range(TRIES):
            decision = decide(record, _nonce())
            started = self._clock()
            if isinstance(decision, Lost):
                return decision
            if isinstance(decision, Already):
                return decision.record, version or "", started
            done, cell = self._swap(decision.record, version)
            if done is not None:
                return decision.record, done, started
            record, version = _parsed(cell, lease.session), cell.version if cell else None
        raise self._too_busy(lease.session)

    def _swap(self, record: LeaseRecord, expected: str | None) -> tuple[str | None, Cell | None]:
        """The new version; or None with what is there instead. A lost answer, and also a "no" (a proxy may have sent
        the request twice), is looked into by reading: our nonce there means it took effect."""
        failure: LeaseUnreachable | None = None
        try:
            version = self.register.write(_as_swap(record, expected))
            if version is not None:
                return version, None
        except LeaseUnreachable as error:
            failure = error
        try:
            cell = self.register.read(record.session)
        except LeaseUnreachable as error:
            raise failure or error from error
        if cell is not None and cell.data == record.to_bytes():
            return cell.version, cell
        if failure is not None and (cell.version if cell else None) == expected:
            raise failure  # it may still be on its way
        return None, cell

    def _too_busy(self, session: str) -> LeaseUnreachable:
        return LeaseUnreachable(
            f"the lease of {session} in {self.url} changed {TRIES} times while it was being written",
            "Try again; if it goes on, two commands or agents on this host work on the same session.",
        )


def _as_swap(record: LeaseRecord, expected: str | None) -> Swap:
    live_for = record.ttl if record.state == "held" else None
    return Swap(record.session, record.to_bytes(), expected, live_for)


def _parsed(cell: Cell | None, session: str) -> LeaseRecord | None:
    return None if cell is None else parse(cell.data, session)


def _claim(lease: Held) -> Claim:
    return Claim(lease.session, lease.record.instance, lease.token)


def _nonce() -> str:
    return os.urandom(16).hex()
