"""Evict sessions nobody needs right now: checkpoint, then park; or end them, when told to.

A session is idle when for that long no client was attached, nothing was typed
or printed, and its processes did no work worth the name. That is looked at again
by the holder itself, in the same instant in which it is stopped: who attaches
first keeps it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from cmdop_migrate.errors import CmdopError, NotIdle
from cmdop_migrate.host import kill, talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.snapshot import checkpoint
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions
from cmdop_migrate.util.timings import Phases

GRACE = 5.0
Row = dict[str, Any]


def idle(this_host: Host, seconds: float) -> list[Row]:
    """Rows of `ls`: what runs here and has been idle for so long, the longest first. Pure but for reading them."""
    return sorted((row for row in talk.list_all(this_host) if is_idle(row, seconds)), key=lambda row: -row["idle_s"])


def is_idle(row: Row, seconds: float) -> bool:
    """One whose holder does not answer is not known to be."""
    return row["state"] == "running" and not row["clients"] and row["idle_s"] is not None and row["idle_s"] >= seconds


def reap(this_host: Host, seconds: float, destroy: bool, dry_run: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """-> what `reap --json` answers: `reaped`, `failed` (they run on) and `left` (they woke up, or went, in the
    meantime)."""
    how = "destroyed" if destroy else "parked"
    reaped: list[Row] = []
    failed: list[Row] = []
    left: list[Row] = []
    for row in idle(this_host, seconds):
        facts = {"session": row["session"], "name": row["name"], "idle_s": row["idle_s"]}
        say(f"{row['name']}: idle")
        try:
            made = None if dry_run else _reap_one(this_host, row["session"], seconds, destroy, say)
        except NotIdle:
            left.append(facts)
            continue
        except CmdopError as error:
            failed.append({**facts, "code": error.code, "error": error.message})
            continue
        reaped.append({**facts, "how": how, "checkpoint": made})
        if not dry_run:
            words = {"name": row["name"], "how": how, "idle_s": row["idle_s"], "checkpoint": made}
            this_host.note("reaped", row["session"], **words)
    return {"reaped": reaped, "failed": failed, "left": left, "dry_run": dry_run}


def _reap_one(this_host: Host, session: str, seconds: float, destroy: bool, say: Callable[[str], None]) -> str | None:
    now = this_host.load(session)
    if now is None or now.phase != "live":  # others had their turn before it, which takes a while
        raise NotIdle(f"session {session[:12]} does not run here any more", "It is left as it is.")
    if destroy:
        Phases("reap").reach("destroy")
        kill.kill(this_host, session, signal.SIGTERM, GRACE, only_idle=seconds)
        return None
    wanted = CheckpointOptions(reason="reap", only_idle=seconds)
    return checkpoint.checkpoint(this_host, session, wanted, say).manifest.checkpoint
