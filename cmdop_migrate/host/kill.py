"""End a session, also one whose holder hangs."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any, TypeVar

from cmdop_migrate import clock, log
from cmdop_migrate.errors import (
    Blocked,
    CmdopError,
    Fenced,
    NotIdle,
    SessionExited,
    SessionNotFound,
    TimedOut,
    Unreachable,
)
from cmdop_migrate.holder import cgroup, protocol
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Exit, Record
from cmdop_migrate.session.holder_client import HolderGone

LATEST = 10.0  # seconds after its grace that a session takes at most to be gone
GOODBYE = 5.0  # seconds that a holder takes at most to leave, once its session has ended
T = TypeVar("T")
_log = log.get("kill")


def kill(
    this_host: Host, reference: str, number: signal.Signals, grace: float, only_idle: float | None = None
) -> dict[str, Any]:
    """Ends a session, discards a parked one, or forgets one that has ended already. `only_idle`: NotIdle unless it is,
    for so many seconds."""
    try:
        record = this_host.find(reference)
    except SessionNotFound as error:
        if only_idle is not None:
            raise _left(reference) from error
        from cmdop_migrate.host import discard  # brings stores and keys along, which others need not wait for

        return discard.in_store(this_host, reference, error)
    if only_idle is not None and record.phase != "live":
        raise _left(record.name)  # somebody has parked it, say: what is left of it is not idle
    if record.phase == "parked":
        from cmdop_migrate.host import discard

        return discard.parked_here(this_host, record)
    if record.phase == "exited":
        _check_over(this_host, record)
        _forget(this_host, record)
        return {"session": record.session, "exit": record.exit.code if record.exit else None, "removed": True}
    is_unheard = False  # by the holder: on record nobody wished it
    try:
        record, channel = talk.open_channel(this_host, reference)
    except SessionExited:
        return {"session": record.session, "exit": (talk.exit_of(this_host, record.session) or {}).get("code")}
    except TimedOut:
        if only_idle is not None:
            raise
        is_unheard = True
        _kill_without_holder(this_host, record)
    else:
        with channel:
            try:
                asked = {"op": "kill", "signal": int(number), "grace": grace, "only_idle": only_idle}
                if channel.ask(timeout=talk.KILL_TIMEOUT, **asked).get("error") == "active":
                    raise NotIdle(f"session {record.name!r} is in use again", "It goes on.")
            except HolderGone:
                is_unheard = only_idle is None
            except TimedOut:
                if only_idle is not None:
                    raise
                is_unheard = True
                _kill_without_holder(this_host, record)
    if not talk.until(lambda: _is_over(this_host, record.session), bool, grace + LATEST):
        raise TimedOut(
            f"session {record.name!r} was told to end, and has not within {grace + LATEST:.0f} s",
            "Kill it again. A process in uninterruptible sleep (state D in `show`) is the usual cause.",
        )
    this_host.sweep()
    after = this_host.load(record.session)
    if after is not None and after.phase == "parked" and only_idle is None:  # that was first; what we want is the same
        from cmdop_migrate.host import discard

        return discard.parked_here(this_host, after)
    if after is not None and (is_unheard or _is_unwanted(after)):
        _end_lease(this_host, after)
    result = talk.exit_of(this_host, record.session) or {}
    this_host.note("killed", record.session, name=record.name, signal=number.name, **result)
    return {"session": record.session, "exit": result.get("code"), "reason": result.get("reason")}


def _is_unwanted(record: Record) -> bool:
    return record.exit is not None and record.exit.kind == "kill_pending"


def _end_lease(this_host: Host, record: Record) -> None:
    """It may have been parked while it was killed, or its holder went with it and could not note whose wish it was: it
    is not to come back. Where its lease is out of reach the agent goes on with that."""
    from cmdop_migrate.host import leases, reconcile

    try:
        if reconcile.is_doubtful(record):
            reason = protocol.exit_reason("kill_pending")
            wished = Exit(128 + signal.SIGKILL, reason, clock.walltime(), "kill_pending")
            record = this_host.put_right(record, replace(record, exit=wished)) or record
        if _is_unwanted(record):
            reconcile.ask(this_host, leases.open_store(this_host.config), record)
    except (CmdopError, OSError) as error:
        _log.warning("session %s was killed, but its lease has not ended yet: %s", record.name, error)


def _check_over(this_host: Host, record: Record) -> None:
    """Blocked when one of which nobody noted how it ended is parked, as its lease says: who wants to be rid of a record
    does not mean that. Where that cannot be found out, nothing but the record goes."""
    if record.exit is not None and record.exit.code is not None and not _is_unwanted(record):
        return
    from cmdop_migrate.host import leases, reconcile

    if not reconcile.is_doubtful(record) and not _is_unwanted(record):
        return
    try:
        reconcile.ask(this_host, leases.open_store(this_host.config), record)
    except Unreachable:
        if _is_unwanted(record):
            raise
    except OSError as error:
        _log.warning("session %s: %s", record.name, error)
    after = this_host.load(record.session)
    if after is not None and after.phase == "parked":
        words = f"session {record.name!r} has not ended: it is parked, as its lease says"
        raise Blocked(words, f"Bring it back: cmdop-migrate restore {record.name}. To discard it, kill it again.")


def _forget(this_host: Host, record: Record) -> None:
    """A holder that has noted the end still says goodbye. Fenced when the session is being restored here."""

    def is_forgotten() -> bool:
        with this_host.locked():
            return this_host.load(record.session) is None or this_host.forget_ended(record.session)

    if not talk.until(is_forgotten, bool, GOODBYE):
        raise Fenced(f"session {record.name!r} is being restored, or runs, already", "See: cmdop-migrate ls")


def _left(name: str) -> NotIdle:
    return NotIdle(f"session {name!r} does not run here any more", "It is left as it is.")


def _is_over(this_host: Host, session: str) -> bool:
    return this_host.load(session) is None or not this_host.is_held(session)


def _kill_without_holder(this_host: Host, record: Record) -> None:
    """The holder is stopped or stuck: the session's processes go first, so that nothing runs unkept, then it."""
    group = this_host.cgroup(record.session)
    cgroup.kill(group)
    for pid in cgroup.pids(f"{group.rpartition('/')[0]}/holders"):
        if _holds(pid, str(this_host.directory(record.session) / "holder.lock")):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _holds(pid: int, path: str) -> bool:
    try:
        return any(os.readlink(f"/proc/{pid}/fd/{fd}") == path for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False
