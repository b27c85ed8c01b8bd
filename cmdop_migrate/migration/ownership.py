"""Whose is a session that was being handed over? Decided by its lease, and by nothing else.

the copy here     the lease                                          then
runs              –                                                  it never left, or is back: on_source
stands still      held by this host                                  go on under that token: on_source
                  parked (or free) at the checkpoint handed over     take it, a new token, and go on: on_source
                  held by another, renewed by its agent              it runs there: this copy is killed, on_target
                  held by another, not yet known to run              watch; unchanged for a TTL, take it: on_source
                  of a higher token, at another checkpoint, or free  it went on without us: this copy is killed
is gone           held by this host                                  park it at the checkpoint: parked
(holder died)
                  parked                                             parked
                  held by another                                    as above, but taken only to park it
whatever          unreachable                                        nothing is done, the copy stands still
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

# A restore renews once before it lets the session run. The second renewal is its agent's, who renews only what runs.
RUNS_FROM = 2
LOOK_EVERY = 0.1
HOLDER_TIMEOUT = 10.0
_log = log.get("migrate")

Copy = Literal["runs", "stands", "gone", "ended"]  # ended: by itself, or by a person; not with its holder


class Verdict(StrEnum):
    HERE = "it runs here"
    OURS = "the lease is this host's"
    FREE = "nobody has it: take it"
    WATCH = "another has it, and may or may not run it"
    THERE = "it runs there"
    PARKED = "it is parked, and no copy is here"
    OVER = "it ended"


def judge(copy: Copy, lease: LeaseRecord, own: str, move: Move) -> Verdict:
    """Pure. `own`: this host's instance."""
    if copy == "runs":
        return Verdict.HERE
    if copy == "ended" and lease.token == move.token:
        return Verdict.OVER
    if lease.state == "held":
        if lease.instance == own:
            return Verdict.OURS
        moved_on = lease.token > move.token and (lease.renewals >= RUNS_FROM or lease.checkpoint != move.checkpoint)
        return Verdict.THERE if moved_on else Verdict.WATCH
    is_last = move.checkpoint is not None and (lease.token == move.token or lease.checkpoint == move.checkpoint)
    if copy == "stands" and is_last:
        return Verdict.FREE
    if copy == "gone" and lease.state == "free" and is_newest(lease, move):
        return Verdict.FREE
    return Verdict.PARKED if lease.checkpoint is not None else Verdict.OVER


def is_newest(lease: LeaseRecord, move: Move) -> bool:
    """Whether what was about to be handed over is the last of the session: nobody had it after us, and we made no other
    checkpoint of it since. Pure."""
    known = (None, move.parent, move.checkpoint)
    return move.checkpoint is not None and lease.token == move.token and lease.checkpoint in known


@dataclass(frozen=True)
class Settled:
    end: End
    token: int
    host: str


class Settling:
    """One move that was cut off, or failed. Whoever uses it has the move's lock. `back` is called when the copy here
    goes on, with the token it had before."""

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

    def until(self, patience: float) -> Settled:
        """Looks again until it is decided. TimedOut when it is not within `patience`; LeaseUnreachable at once."""
        end = time.monotonic() + patience
        while True:
            found = self.once()
            if isinstance(found, Settled):
                return found
            if time.monotonic() > end:
                raise TimedOut(
                    f"session {self._move.name!r}: it is not known yet whether {self._move.target} runs it",
                    "Its copy here stands still. See later: cmdop-migrate resume",
                )
            time.sleep(min(LOOK_EVERY, found))

    def once(self) -> Settled | float:
        """The decision, carried out; or in how many seconds to look again. LeaseUnreachable: nothing was done."""
        move, this_host = self._move, self._this_host
        copy = self._copy()
        if copy == "runs":
            return Settled(End.ON_SOURCE, self._token(), this_host.config.host)
        if copy in ("gone", "ended") and this_host.is_held(move.session):
            return LOOK_EVERY  # it is just being restored here
        seen = self._leases.inspect(move.session, self._observation)
        if seen is None:
            raise Fenced(
                f"the lease store knows nothing of session {move.name!r}", "Is it the one this host used before?"
            )
        self._observation = seen.observation
        verdict = judge(copy, seen.record, this_host.instance(), move)
        if verdict in (Verdict.OURS, Verdict.FREE, Verdict.WATCH):
            return self._take(copy, verdict, seen.record)
        if copy == "stands":
            self._forget(seen.record)
        else:
            self._note_gone(seen.record, verdict)
        ends = {Verdict.THERE: End.ON_TARGET, Verdict.PARKED: End.PARKED, Verdict.OVER: End.EXITED}
        return Settled(ends[verdict], seen.record.token, seen.record.host)

    def _copy(self) -> Copy:
        this_host, session = self._this_host, self._move.session
        record = this_host.load(session)
        if record is not None and record.phase in ("live", "handing") and not this_host.is_held(session):
            this_host.sweep()  # its holder is dead
            record = this_host.load(session)
        if record is None:
            return "gone"
        if record.exit is not None and record.exit.code is not None:
            return "ended"
        phases: dict[str, Copy] = {"live": "runs", "handing": "stands"}
        return phases.get(record.phase, "gone")

    def _token(self) -> int:
        record = self._this_host.load(self._move.session)
        return record.token if record is not None else self._move.token

    def _take(self, copy: Copy, verdict: Verdict, lease: LeaseRecord) -> Settled | float:
        config, move = self._this_host.config, self._move
        ours = verdict is Verdict.OURS
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
            return 0.0  # it has just changed hands: look again
        if copy == "stands":
            return self._go_on(answer)
        if self._this_host.is_held(move.session):
            return LOOK_EVERY  # a restore here has begun since we looked: its lock comes before its lease
        return self._park(answer, lease)

    def _go_on(self, lease: Held) -> Settled | float:
        """The copy here runs again, under the token we hold."""
        try:
            answer = self._ask(op="take_back", token=lease.token, until=lease.fresh_until, since=lease.started)
        except HolderGone:
            return 0.0
        if answer.get("error"):
            raise Fenced(
                f"session {self._move.name!r} cannot go on here: {answer['error']}", "It stands still. See: ls"
            )
        self._this_host.note("taken_back", self._move.session, name=self._move.name, token=lease.token)
        self._back(self._move.session, self._move.token)
        return Settled(End.ON_SOURCE, lease.token, self._this_host.config.host)

    def _park(self, lease: Held, before: LeaseRecord) -> Settled | float:
        """Nothing of it is here any more: the store has it, or nobody."""
        move = self._move
        checkpoint = move.checkpoint if is_newest(before, move) else before.checkpoint or move.checkpoint
        if checkpoint is None:
            host_leases.let_go(self._leases, lease)
            return Settled(End.EXITED, lease.token, self._this_host.config.host)
        if not isinstance(self._leases.park(lease, checkpoint), Ended):
            return 0.0
        self._note_parked(checkpoint)
        return Settled(End.PARKED, lease.token, self._this_host.config.host)

    def _forget(self, lease: LeaseRecord) -> None:
        forget(self._this_host, self._move.session, lease.host, lease.token, self._timeout)

    def _note_gone(self, lease: LeaseRecord, verdict: Verdict) -> None:
        if verdict is Verdict.PARKED and lease.checkpoint is not None:
            self._note_parked(lease.checkpoint)
        elif verdict is Verdict.THERE:
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


def settle(this_host: Host, move: Move) -> Settled:
    """Decided now, or as soon as a lease that another host does not renew has run out."""
    patience = 2 * margins.contender_wait(this_host.config.lease_ttl) + 5.0

    def back(session: str, token: int) -> None:
        tell_hooks(this_host, session, token)

    return Settling(this_host, host_leases.open_store(this_host.config), move, back).until(patience)


def tell_hooks(this_host: Host, session: str, before: int) -> None:
    """Those that heard of the freeze hear that it goes on here after all; under a new token, if it is one."""
    record = this_host.load(session)
    if record is None or record.phase != "live":
        return
    events = (hooks.POST_THAW, *((hooks.TOKEN,) if record.token != before else ()))
    for event in events:
        hooks.run(
            this_host, event, record, reason="migrate", to=this_host.config.host, **{"from": this_host.config.host}
        )


def forget(this_host: Host, session: str, host: str, token: int, timeout: float = HOLDER_TIMEOUT) -> None:
    """The copy here, which stands still, is killed; its record says where the session went."""
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
        _log.warning("the copy of %s here does not go: %s", session, error.message)
        raise


def note_moved(this_host: Host, session: str, host: str, token: int) -> None:
    """On record, of a session that is parked as far as this host knows."""
    record = this_host.load(session)
    if record is not None and record.phase == "parked":
        ended = Exit(None, exit_reason("moved", to=host, token=token), clock.walltime(), "moved", host, token)
        this_host.save(replace(record, phase="exited", exit=ended, pid=None))
