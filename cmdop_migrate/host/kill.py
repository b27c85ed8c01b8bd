"""Kill a session: end one that runs, also if its holder hangs; discard one that is parked; forget one that has ended.

A session that exists only in the store is discarded by ending its lease, so that no host restores it again. Its
checkpoints stay until they are pruned, and can be restored as copies. The lease is ended first, then this host's record
is removed: if the command is killed in between, the next `kill` finishes it.
"""

from __future__ import annotations

import os
import signal
from dataclasses import asdict, dataclass, replace
from typing import Literal

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

END_WITHIN = 10.0  # seconds after its grace period within which a session must have ended
HOLDER_EXITS_WITHIN = 5.0  # seconds that a holder needs at most to exit once its session has ended
ID_DIGITS_TO_DISCARD = 8  # digits of a session id that make a reference to it explicit enough to discard the session
_log = log.get("kill")


@dataclass(frozen=True)
class KillResult:
    """Describe what `kill` did. `exit` is the exit status, None if it is unknown. `checkpoint` and `token` are set for
    a discarded session: the checkpoint that its lease named last, and the fencing token of the ended lease."""

    session: str
    outcome: Literal["ended", "removed", "discarded"]
    exit: int | None = None
    reason: str | None = None
    checkpoint: str | None = None
    token: int | None = None


def kill(
    this_host: Host, reference: str, number: signal.Signals, grace: float, only_idle: float | None = None
) -> KillResult:
    """End a running session, discard a parked one, or forget one that has ended already.

    With `only_idle`, raise NotIdle unless the session has been idle for that many seconds. Raise TimedOut if the
    session has not ended END_WITHIN seconds after `grace`, Fenced if another host has it.
    """
    try:
        record = this_host.find(reference)
    except SessionNotFound as error:
        if only_idle is not None:
            raise _not_here(reference) from error
        return _discard_from_store(this_host, reference, error)
    if only_idle is not None and record.phase != "live":
        raise _not_here(record.name)  # for example parked by another command: then it is not idle
    if record.phase == "parked":
        return _discard(this_host, record.session, record.name, record.token)
    if record.phase == "exited":
        _check_over(this_host, record)
        _forget(this_host, record)
        return KillResult(record.session, "removed", record.exit.code if record.exit else None)
    is_unheard = False  # the holder did not receive the request, so it does not record that the session was killed
    try:
        record, channel = talk.open_channel(this_host, reference)
    except SessionExited:
        return _ended(record.session, talk.exit_of(this_host, record.session))
    except TimedOut:
        if only_idle is not None:
            raise
        is_unheard = True
        _kill_without_holder(this_host, record)
    else:
        with channel:
            try:
                request = {"op": "kill", "signal": int(number), "grace": grace, "only_idle": only_idle}
                if channel.ask(timeout=talk.KILL_TIMEOUT, **request).get("error") == "active":
                    raise NotIdle(f"session {record.name!r} is in use again", "It keeps running.")
            except HolderGone:
                is_unheard = only_idle is None
            except TimedOut:
                if only_idle is not None:
                    raise
                is_unheard = True
                _kill_without_holder(this_host, record)
    if not talk.until(lambda: _is_over(this_host, record.session), bool, grace + END_WITHIN):
        raise TimedOut(
            f"session {record.name!r} did not end within {grace + END_WITHIN:.0f} s",
            "Kill it again. A process in uninterruptible sleep (state D in `show`) is the usual cause.",
        )
    this_host.sweep()
    after = this_host.load(record.session)
    if after is not None and after.phase == "parked" and only_idle is None:  # it was parked before it could be killed
        return _discard(this_host, after.session, after.name, after.token)
    if after is not None and (is_unheard or _is_unwanted(after)):
        _end_lease(this_host, after)
    ended = talk.exit_of(this_host, record.session)
    this_host.note("killed", record.session, name=record.name, signal=number.name, **(asdict(ended) if ended else {}))
    return _ended(record.session, ended)


def _ended(session: str, ended: Exit | None) -> KillResult:
    return KillResult(session, "ended", ended.code if ended else None, ended.reason if ended else None)


def _is_unwanted(record: Record) -> bool:
    return record.exit is not None and record.exit.kind == "kill_pending"


def _end_lease(this_host: Host, record: Record) -> None:
    """End the lease of a killed session, so that no host restores it.

    It may have been parked while it was killed, or its holder died with it and could not record that the session was
    killed on request. If the lease store is unreachable, the agent ends the lease later.
    """
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
    """Raise Blocked if the lease says that the session is parked although no process recorded how it ended: a person
    who removes the record of an ended session does not mean to discard a parked one.

    If the lease store is unreachable, only the record is removed, unless the session was killed on request.
    """
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
        raise Blocked(
            f"session {record.name!r} has not ended: its lease says that it is parked",
            f"Restore it: cmdop-migrate restore {record.name}. To discard it, kill it again.",
        )


def _forget(this_host: Host, record: Record) -> None:
    """Remove the record of an ended session, once its holder has exited. Raise Fenced if it is being restored here."""

    def is_forgotten() -> bool:
        with this_host.locked():
            return this_host.load(record.session) is None or this_host.forget_ended(record.session)

    if not talk.until(is_forgotten, bool, HOLDER_EXITS_WITHIN):
        raise Fenced(f"session {record.name!r} is being restored, or runs, already", "See: cmdop-migrate ls")


def _not_here(name: str) -> NotIdle:
    return NotIdle(f"session {name!r} does not run here any more", "It is left as it is.")


def _is_over(this_host: Host, session: str) -> bool:
    return this_host.load(session) is None or not this_host.is_held(session)


def _kill_without_holder(this_host: Host, record: Record) -> None:
    """Kill a session whose holder is stopped or hangs: first its processes, so that none runs without a holder, then
    the holder."""
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


def _discard_from_store(this_host: Host, reference: str, not_found: SessionNotFound) -> KillResult:
    """Discard a session that this host has no record of. Raise `not_found` if the store does not know it either."""
    from cmdop_migrate.host import references  # loads stores and keys, which most kills do not need

    session = references.session_of(this_host, reference)
    if session is None:
        raise not_found
    manifests = references.manifests(this_host, session)
    newest = max(manifests, key=lambda manifest: manifest.token, default=None)
    name = str(newest.facts.get("name")) if newest is not None else session
    if reference != name and len(reference) < ID_DIGITS_TO_DISCARD:
        raise SessionNotFound(
            f"no session {reference!r} here; the id of one in the store begins with it",
            f"Give its name, or more of its id: {session[:12]}",
        )
    return _discard(this_host, session, name, newest.token if newest is not None else 0)


def _discard(this_host: Host, session: str, name: str, above: int) -> KillResult:
    """End the lease of a parked session, then remove its record. Raise Fenced if another host runs it by now."""
    from cmdop_migrate.host import leases, session_lock

    lock = session_lock.to_discard(this_host, session, name)
    try:
        before, after = leases.end(leases.open_store(this_host.config), this_host, session, name, above)
        this_host.note("discarded", session, name=name, token=after.token, checkpoint=before)
        this_host.forget(session)
    finally:
        if not (this_host.directory(session) / "session.json").exists():
            this_host.forget(session)  # the directory was made only for the lock
        os.close(lock)
    return KillResult(session, "discarded", reason="discarded", checkpoint=before, token=after.token)
