"""Decide which host has a session that was being handed over: by its lease, and by nothing else.

the copy here     the lease                                          decision
runs              –                                                  it never left, or is back: on_source
frozen            held by this host                                  resume under that token: on_source
                  parked (or free) at the checkpoint handed over     take it, a new token, and resume: on_source
                  held by another host, renewed by its agent         it runs there: kill this copy, on_target
                  held by another host, not yet known to run         watch; if unchanged for a TTL, take it: on_source
                  of a higher token, at another checkpoint, or free  the session continued elsewhere: kill this copy
gone              held by this host                                  park it at the checkpoint: parked
(holder died)
                  parked                                             parked
                  held by another host                               as above, but take it only to park it
any               unreachable                                        do nothing, the copy stays frozen
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from cmdop_migrate import clock, log
from cmdop_migrate.errors import CmdopError, Fenced, TimedOut
from cmdop_migrate.holder.protocol import exit_reason
from cmdop_migrate.host import hooks
from cmdop_migrate.host import leases as host_leases
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import End, Move
from cmdop_migrate.lease import margins
from cmdop_migrate.lease.record import LeaseRecord
from cmdop_migrate.lease.rules import ANY, AnyCheckpoint, Observation
from cmdop_migrate.lease.store import Ended, Held, LeaseStore, Waiting
from cmdop_migrate.model import Exit
from cmdop_migrate.session.holder_client import Channel, HolderGone

# A restore renews once before it lets the session run. The second renewal is that of the agent, which renews only
# sessions that run.
RENEWALS_OF_RUNNING = 2
LEASE_POLL_INTERVAL = 0.1
HOLDER_TIMEOUT = 10.0
_log = log.get("migrate")

LocalCopy = Literal["runs", "frozen", "gone", "ended"]  # gone: with its holder; ended: it exited, or was killed


class Ownership(StrEnum):
    """Name who has a session that was being handed over."""

    HERE = "it runs here"
    OURS = "this host holds the lease"
    FREE = "no host holds the lease: take it"
    WATCH = "another host holds the lease, and may or may not run it"
    THERE = "it runs on another host"
    PARKED = "it is parked, and no copy is here"
    OVER = "it ended"


def decide(copy: LocalCopy, lease: LeaseRecord, own: str, move: Move) -> Ownership:
    """Decide who has the session, by the table above. `own` is this host's instance. Pure."""
    if copy == "runs":
        return Ownership.HERE
    if copy == "ended" and lease.token == move.token:
        return Ownership.OVER
    if lease.state == "held":
        if lease.instance == own:
            return Ownership.OURS
        moved_on = lease.token > move.token and (
            lease.renewals >= RENEWALS_OF_RUNNING or lease.checkpoint != move.checkpoint
        )
        return Ownership.THERE if moved_on else Ownership.WATCH
    is_last = move.checkpoint is not None and (lease.token == move.token or lease.checkpoint == move.checkpoint)
    if copy == "frozen" and is_last:
        return Ownership.FREE
    if copy == "gone" and lease.state == "free" and is_newest(lease, move):
        return Ownership.FREE
    return Ownership.PARKED if lease.checkpoint is not None else Ownership.OVER


def is_newest(lease: LeaseRecord, move: Move) -> bool:
    """Return whether the checkpoint that was to be handed over is the newest state of the session: no other host held
    the lease after this one, and this host made no other checkpoint since. Pure."""
    known = (None, move.parent, move.checkpoint)
    return move.checkpoint is not None and lease.token == move.token and lease.checkpoint in known


@dataclass(frozen=True)
class MoveOutcome:
    """Say where the session of a settled move is, and under which fencing token."""

    end: End
    token: int
    host: str


class MoveSettlement:
    """Settle one move that was interrupted or failed. The caller must hold the move's lock. `back` is called when the
    copy here resumes, with the session and the token it had before."""

    def __init__(
        self,
        this_host: Host,
        leases: LeaseStore,
        move: Move,
        back: Callable[[str, int], None],
        timeout: float = HOLDER_TIMEOUT,
    ) -> None:
        self._this_host, self._leases, self._move = this_host, leases, move
        self._back, self._timeout = back, timeout
        self._observation: Observation | None = None

    def until(self, timeout: float) -> MoveOutcome:
        """Try until it is decided. Raises TimedOut if it is not within `timeout`, LeaseUnreachable immediately."""
        until = time.monotonic() + timeout
        while True:
            result = self.once()
            if isinstance(result, MoveOutcome):
                return result
            if time.monotonic() > until:
                raise TimedOut(
                    f"session {self._move.name!r}: it is not known yet whether {self._move.target} runs it",
                    "Its copy here stays frozen. Ask again later: cmdop-migrate resume",
                )
            time.sleep(min(LEASE_POLL_INTERVAL, result))

    def once(self) -> MoveOutcome | float:
        """Decide and carry the decision out; or return in how many seconds to try again. Raises LeaseUnreachable if
        nothing was decided or done."""
        move, this_host = self._move, self._this_host
        copy = self._copy()
        if copy == "runs":
            return MoveOutcome(End.ON_SOURCE, self._token(), this_host.config.host)
        if copy in ("gone", "ended") and this_host.is_held(move.session):
            return LEASE_POLL_INTERVAL  # a restore of it is under way here
        seen = self._leases.inspect(move.session, self._observation)
        if seen is None:
            raise Fenced(
                f"the lease store has no lease of session {move.name!r}", "Is it the one this host used before?"
            )
        self._observation = seen.observation
        owner = decide(copy, seen.record, this_host.instance(), move)
        if owner in (Ownership.OURS, Ownership.FREE, Ownership.WATCH):
            return self._take(copy, owner, seen.record)
        if copy == "frozen":
            self._remove_copy(seen.record)
        else:
            self._note_gone(seen.record, owner)
        ends = {Ownership.THERE: End.ON_TARGET, Ownership.PARKED: End.PARKED, Ownership.OVER: End.EXITED}
        return MoveOutcome(ends[owner], seen.record.token, seen.record.host)

    def _copy(self) -> LocalCopy:
        this_host, session = self._this_host, self._move.session
        record = this_host.load(session)
        if record is not None and record.phase in ("live", "handing") and not this_host.is_held(session):
            this_host.sweep()  # its holder is dead: correct the record
            record = this_host.load(session)
        if record is None:
            return "gone"
        if record.exit is not None and record.exit.code is not None:
            return "ended"
        phases: dict[str, LocalCopy] = {"live": "runs", "handing": "frozen"}
        return phases.get(record.phase, "gone")

    def _token(self) -> int:
        record = self._this_host.load(self._move.session)
        return record.token if record is not None else self._move.token

    def _take(self, copy: LocalCopy, owner: Ownership, lease: LeaseRecord) -> MoveOutcome | float:
        config, move = self._this_host.config, self._move
        ours = owner is Ownership.OURS
        expect: str | AnyCheckpoint | None = ANY if ours else lease.checkpoint
        answer = self._leases.acquire(
            move.session,
            config.host,
            self._this_host.instance(),
            config.lease_ttl,
            observation=self._observation,
            expect_checkpoint=expect,
            resume_token=lease.token if ours else None,
            above=move.token,
        )
        if isinstance(answer, Waiting):
            self._observation = answer.observation
            return answer.seconds
        if not isinstance(answer, Held):
            return 0.0  # the lease has just changed: decide again
        if copy == "frozen":
            return self._take_back(answer)
        if self._this_host.is_held(move.session):
            return LEASE_POLL_INTERVAL  # a restore has begun here meanwhile: it takes its lock before its lease
        return self._park(answer, lease)

    def _take_back(self, lease: Held) -> MoveOutcome | float:
        """Resume the frozen copy here under the token of the lease this host holds now."""
        try:
            answer = self._ask(op="take_back", token=lease.token, until=lease.fresh_until, since=lease.started)
        except HolderGone:
            return 0.0
        if answer.get("error"):
            raise Fenced(
                f"session {self._move.name!r} cannot resume here: {answer['error']}",
                "It stays frozen. See: cmdop-migrate ls",
            )
        self._this_host.note("taken_back", self._move.session, name=self._move.name, token=lease.token)
        self._back(self._move.session, self._move.token)
        return MoveOutcome(End.ON_SOURCE, lease.token, self._this_host.config.host)

    def _park(self, lease: Held, before: LeaseRecord) -> MoveOutcome | float:
        """Park the lease at the newest checkpoint, because no copy is left here; without a checkpoint the session has
        ended, and the lease is released."""
        move = self._move
        checkpoint = move.checkpoint if is_newest(before, move) else before.checkpoint or move.checkpoint
        if checkpoint is None:
            host_leases.let_go(self._leases, lease)
            return MoveOutcome(End.EXITED, lease.token, self._this_host.config.host)
        if not isinstance(self._leases.park(lease, checkpoint), Ended):
            return 0.0
        self._note_parked(checkpoint)
        return MoveOutcome(End.PARKED, lease.token, self._this_host.config.host)

    def _remove_copy(self, lease: LeaseRecord) -> None:
        remove_copy(self._this_host, self._move.session, lease.host, lease.token, self._timeout)

    def _note_gone(self, lease: LeaseRecord, owner: Ownership) -> None:
        if owner is Ownership.PARKED and lease.checkpoint is not None:
            self._note_parked(lease.checkpoint)
        elif owner is Ownership.THERE:
            note_moved(self._this_host, self._move.session, lease.host, lease.token)

    def _note_parked(self, checkpoint: str) -> None:
        this_host = self._this_host
        record = this_host.load(self._move.session)
        if record is None or record.phase not in ("parked", "exited"):
            return
        this_host.save(replace(record, phase="parked", checkpoint=checkpoint, exit=None, pid=None))

    def _ask(self, **request: object) -> dict[str, object]:
        with Channel(self._this_host.socket(self._move.session)) as channel:
            return channel.ask(timeout=self._timeout, **request)


def settle(this_host: Host, move: Move) -> MoveOutcome:
    """Settle a move: immediately, or as soon as a lease that another host does not renew has run out."""
    timeout = 2 * margins.contender_wait(this_host.config.lease_ttl) + 5.0

    def back(session: str, token: int) -> None:
        tell_hooks(this_host, session, token)

    return MoveSettlement(this_host, host_leases.open_store(this_host.config), move, back).until(timeout)


def tell_hooks(this_host: Host, session: str, before: int) -> None:
    """Run the post-thaw hooks of a session that resumed here after a failed move, and the token hooks if it has a new
    token. `before` is its token before the move."""
    record = this_host.load(session)
    if record is None or record.phase != "live":
        return
    events = (hooks.POST_THAW, *((hooks.TOKEN,) if record.token != before else ()))
    for event in events:
        hooks.run(
            this_host, event, record, reason="migrate", to=this_host.config.host, **{"from": this_host.config.host}
        )


def remove_copy(this_host: Host, session: str, host: str, token: int, timeout: float = HOLDER_TIMEOUT) -> None:
    """Have the holder kill the frozen copy here, and record where the session went."""
    try:
        with Channel(this_host.socket(session)) as channel:
            why = exit_reason("moved", to=host, token=token)
            channel.ask(op="moved", why=why, to=host, token=token, timeout=timeout)
            for _ in channel.follow(timeout=timeout):
                pass
    except HolderGone:
        this_host.sweep()
        note_moved(this_host, session, host, token)
    except CmdopError as error:
        _log.warning("the frozen copy of %s cannot be removed: %s", session, error.message)
        raise


def note_moved(this_host: Host, session: str, host: str, token: int) -> None:
    """Record that a session, which is parked as far as this host knows, runs on another host."""
    record = this_host.load(session)
    if record is not None and record.phase == "parked":
        ended = Exit(None, exit_reason("moved", to=host, token=token), clock.walltime(), "moved", host, token)
        this_host.save(replace(record, phase="exited", exit=ended, pid=None))
