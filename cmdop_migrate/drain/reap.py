"""Reap idle sessions: checkpoint, then park them; or end them, with --destroy.

A session is idle if for that long no client was attached, nothing was typed or printed, and its processes did no
significant work. The holder checks this again in the same instant in which it freezes or ends the session, so a client
that attaches first keeps it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cmdop_migrate.errors import CmdopError, NotIdle
from cmdop_migrate.host import kill, listing
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.listing import SessionRow
from cmdop_migrate.snapshot import checkpoint
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions
from cmdop_migrate.util.timings import Phases

GRACE = 5.0  # seconds between SIGTERM and SIGKILL for a session that is destroyed


@dataclass(frozen=True)
class IdleSession:
    """Name an idle session that was left alone."""

    session: str
    name: str
    idle_s: float


@dataclass(frozen=True)
class ReapedSession(IdleSession):
    """Describe a session that was reaped, or with a dry run would be."""

    how: Literal["parked", "destroyed"]
    checkpoint: str | None


@dataclass(frozen=True)
class FailedSession(IdleSession):
    """Describe an idle session that could not be reaped and keeps running: the code and message of the error."""

    code: str
    error: str


@dataclass(frozen=True)
class ReapResult:
    """Describe what `reap` did. `left`: sessions that became active, or left this host, in the meantime."""

    reaped: tuple[ReapedSession, ...]
    failed: tuple[FailedSession, ...]
    left: tuple[IdleSession, ...]
    dry_run: bool


def idle(this_host: Host, seconds: float) -> list[SessionRow]:
    """Return the `ls` rows of sessions that run here and have been idle for `seconds`, the longest first."""
    rows = (row for row in listing.list_here(this_host) if is_idle(row, seconds))
    return sorted(rows, key=lambda row: -(row.idle_s or 0.0))


def is_idle(row: SessionRow, seconds: float) -> bool:
    """Tell whether a session is known to be idle. One whose holder does not answer is not."""
    return row.state == "running" and not row.clients and row.idle_s is not None and row.idle_s >= seconds


def reap(this_host: Host, seconds: float, destroy: bool, dry_run: bool, report: Callable[[str], None]) -> ReapResult:
    """Reap all sessions that have been idle for `seconds`, one after the other. A failure does not stop the others."""
    how: Literal["parked", "destroyed"] = "destroyed" if destroy else "parked"
    reaped: list[ReapedSession] = []
    failed: list[FailedSession] = []
    left: list[IdleSession] = []
    for row in idle(this_host, seconds):
        session, name, idle_s = row.session, row.name, row.idle_s or 0.0
        report(f"{name}: idle")
        try:
            made = None if dry_run else _reap_one(this_host, session, seconds, destroy, report)
        except NotIdle:
            left.append(IdleSession(session, name, idle_s))
            continue
        except CmdopError as error:
            failed.append(FailedSession(session, name, idle_s, error.code, error.message))
            continue
        reaped.append(ReapedSession(session, name, idle_s, how, made))
        if not dry_run:
            this_host.note("reaped", session, name=name, how=how, idle_s=idle_s, checkpoint=made)
    return ReapResult(tuple(reaped), tuple(failed), tuple(left), dry_run)


def _reap_one(
    this_host: Host, session: str, seconds: float, destroy: bool, report: Callable[[str], None]
) -> str | None:
    now = this_host.load(session)
    if now is None or now.phase != "live":  # reaping the sessions before it took a while
        raise NotIdle(f"session {session[:12]} does not run here any more", "It is left as it is.")
    if destroy:
        Phases("reap").reach("destroy")
        kill.kill(this_host, session, signal.SIGTERM, GRACE, only_idle=seconds)
        return None
    options = CheckpointOptions(reason="reap", only_idle=seconds)
    return checkpoint.checkpoint(this_host, session, options, report).manifest.checkpoint
