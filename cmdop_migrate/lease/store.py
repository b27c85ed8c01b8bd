"""Apply the rules over any register.

"Lost the race" is a result. "Unreachable" is an exception, and after it nothing is known: the request may have taken
effect, or may yet. Any later *successful* call for the session settles it, because the swaps of one session have one
order: a late write that expected an older version is refused forever.
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

SWAP_TRIES = 8  # swaps lost in a row to other writers of this host (an agent and a command) before giving up


@dataclass(frozen=True, slots=True)
class Held:
    """Report that the session is ours under `record.token`. `started`: CLOCK_BOOTTIME when the request that proved it
    began."""

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
        """Return the moment of CLOCK_BOOTTIME after which the session must be frozen, unless renewed."""
        return self.started + fresh_for(self.record.ttl)


@dataclass(frozen=True, slots=True)
class Ended:
    """Report that the lease is parked or free, as `record` says; the holder no longer has it."""

    record: LeaseRecord
    version: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Report that another host holds it, and is not known to be gone. Ask again in `seconds`, with this observation."""

    observation: Observation | None
    seconds: float
    holder: LeaseRecord


@dataclass(frozen=True, slots=True)
class LeaseView:
    """Show a lease as read. `observation` (None if the lease is not held) may be passed to a later acquire on this
    host."""

    record: LeaseRecord
    version: str
    lapsed: bool
    observation: Observation | None


Renewed = Held | Lost | LeaseUnreachable | LeaseUnreadable
_Decide = Callable[[LeaseRecord | None, str], Grant | Already | Lost]


class LeaseStore:
    """Acquire, renew and end leases. All methods may be called from several threads and processes simultaneously."""

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
        """Take the lease under a new fencing token, higher than every one before; with `resume_token`, continue under
        that one."""
        check_session(session)
        request = AcquireRequest(
            session,
            check_session(host),
            check_instance(instance),
            check_ttl(ttl),
            expect_checkpoint,
            resume_token,
            above,
        )
        cell = self.register.read(session)
        for _ in range(SWAP_TRIES):
            now = self._clock()  # after the answer (see Observation)
            record = _parsed(cell, session)
            observation = rules.observe(record, observation, now)
            decision = rules.acquire(record, request, observation, now, _nonce(), cell is not None and cell.lapsed)
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
        """Prove that the lease is still ours, and extend it by another TTL from the start of this call."""
        claim = _claim(lease)
        return self._as_held(lease, lambda record, nonce: rules.renew(record, claim, nonce))

    def renew_many(self, leases: Sequence[Held]) -> list[Renewed]:
        """Renew each lease, in order, as fast as the backend can. A failure of one does not stop the others."""
        if self.register.batch > 1:
            size = self.register.batch
            parts = [leases[at : at + size] for at in range(0, len(leases), size)]
            return [answer for part in parts for answer in self._renew_batch(part)]
        if self.register.threads > 1 and len(leases) > 1:
            with ThreadPoolExecutor(min(self.register.threads, len(leases)), "lease") as pool:
                return list(pool.map(self._renew_or_error, leases))
        return [self._renew_or_error(lease) for lease in leases]

    def commit_checkpoint(self, lease: Held, checkpoint: str) -> Held | Lost:
        """Make `checkpoint` the one that a restore starts from, and renew. The store refuses it from a superseded
        holder."""
        check_checkpoint(checkpoint)
        claim = _claim(lease)
        return self._as_held(lease, lambda record, nonce: rules.commit_checkpoint(record, claim, checkpoint, nonce))

    def park(self, lease: Held, checkpoint: str) -> Ended | Lost:
        """Make `checkpoint` the only form of the session. The session must be frozen already: another host may run it
        before this returns. After LeaseUnreachable: a renew that returns Held proves that it was not parked and will
        not be; one that returns Lost(parked) proves that it was."""
        check_checkpoint(checkpoint)
        claim = _claim(lease)
        return self._as_ended(lease, lambda record, nonce: rules.park(record, claim, checkpoint, nonce))

    def release(self, lease: Held, *, keep_checkpoint: bool = False) -> Ended | Lost:
        """Free the lease of a session that ended. The token stays in the record, so that tokens never decrease. With
        `keep_checkpoint` the last checkpoint may still be restored under this identity."""
        claim = _claim(lease)
        return self._as_ended(lease, lambda record, nonce: rules.release(record, claim, keep_checkpoint, nonce))

    def expire_fork(self, session: str, initial: str, most: int) -> bool:
        """Return True if a fork that never ran is ended and will not run; rules.expire_fork says which forks."""
        cell = self.register.read(check_session(session))
        for _ in range(SWAP_TRIES):
            decision = rules.expire_fork(_parsed(cell, session), session, initial, most, _nonce())
            if not isinstance(decision, Grant):
                return isinstance(decision, Already)
            version, cell = self._swap(decision.record, cell.version if cell else None)
            if version is not None:
                return True
        raise self._too_busy(session)

    def inspect(self, session: str, observation: Observation | None = None) -> LeaseView | None:
        """Return the lease as it is, or None if there never was one. Changes nothing."""
        cell = self.register.read(check_session(session))
        now = self._clock()
        record = _parsed(cell, session)
        if cell is None or record is None:
            return None
        return LeaseView(record, cell.version, cell.lapsed, rules.observe(record, observation, now))

    def sessions(self) -> Iterator[str]:
        """Return the sessions that have a lease, in any state."""
        return self.register.sessions()

    def force_break(self, session: str, host: str, instance: str, *, above: int = 0) -> Ended | Lost:
        """Take the lease from its holder immediately: parked at its last checkpoint, or free. For a person who knows
        the holder is dead; if it is not, two copies may run until it is notified. A record that cannot be read is
        replaced only with `above`, the highest token seen anywhere; one of a newer version never."""
        request = AcquireRequest(
            check_session(session), check_session(host), check_instance(instance), 1.0, above=above
        )
        cell = self.register.read(session)
        for _ in range(SWAP_TRIES):
            decision = self._break_one(cell, request)
            if isinstance(decision, Lost):
                return decision
            if isinstance(decision, Already):
                return Ended(decision.record, cell.version if cell else "")
            version, cell = self._swap(decision.record, cell.version if cell else None)
            if version is not None:
                return Ended(decision.record, version)
        raise self._too_busy(session)

    def check(self) -> None:
        """Check at start-up that the register answers and keeps its contract. Raise BadConfig or LeaseUnreachable."""
        self.register.check()
        self.register.read("check")

    def close(self) -> None:
        self.register.close()

    def _break_one(self, cell: Cell | None, request: AcquireRequest) -> Grant | Already | Lost:
        try:
            return rules.break_held(_parsed(cell, request.session), request, _nonce())
        except LeaseUnreadable as error:
            if request.above == 0 or type(error) is not LeaseUnreadable:
                raise
        return Grant(
            LeaseRecord(
                request.session,
                request.above + 1,
                "free",
                request.host,
                request.instance,
                request.ttl,
                0,
                None,
                _nonce(),
            )
        )

    def _renew_batch(self, leases: Sequence[Held]) -> list[Renewed]:
        """Renew all with one request; settle the rest one by one."""
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
        """Swap the record that the holder knows; if it is outdated, read it and decide again."""
        record: LeaseRecord | None = lease.record
        version: str | None = lease.version
        for _ in range(SWAP_TRIES):
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
        """Return the new version; or None with the current cell. After a lost answer, and also after a refusal (a proxy
        may have sent the request twice), read: our nonce there means that the write took effect."""
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
            raise failure  # the write may still arrive
        return None, cell

    def _too_busy(self, session: str) -> LeaseUnreachable:
        return LeaseUnreachable(
            f"the lease of {session} in {self.url} changed {SWAP_TRIES} times while it was being written",
            "Try again; if it persists, two commands or agents on this host work on the same session.",
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
