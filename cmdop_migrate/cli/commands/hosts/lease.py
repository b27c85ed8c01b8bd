"""Show or break the lease of a session."""

from __future__ import annotations

import sys
from typing import Any

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import Fenced, LeaseNewer, LeaseUnreadable, SessionNotFound, Usage
from cmdop_migrate.host import kill, leases, references
from cmdop_migrate.host.host import Host
from cmdop_migrate.lease.rules import Lost
from cmdop_migrate.lease.store import LeaseView
from cmdop_migrate.model import is_session_id


@click.group(epilog="Example: cmdop-migrate lease show work")
def lease() -> None:
    """Show or break the lease of a session: which host may run it."""


@lease.command("show")
@click.argument("session")
@command
def show_lease(app: App, session: str) -> None:
    """Show which host holds a session, and under which fencing token.

    \b
    Examples:
      cmdop-migrate lease show work
    """
    this_host = app.this_host()
    _, seen = _seen(this_host, session)
    facts = _facts(seen)
    if app.json:
        render.answer(facts)
    else:
        render.line(f"{session}: {facts['state']} by {facts['host']}, token {facts['token']}, TTL {facts['ttl_s']:g} s")
        if facts["checkpoint"]:
            render.line(f"  its last checkpoint: {facts['checkpoint']}")


@lease.command("break")
@click.argument("session")
@click.option("--yes", is_flag=True, help="Do not ask.")
@command
def break_lease(app: App, session: str, yes: bool) -> None:
    """Take a session from a host that is certainly dead.

    If that host still runs it, two copies run until its agent sees the new lease. Waiting is safe: restore --wait 60s.

    \b
    Examples:
      cmdop-migrate lease break work
    """
    this_host = app.this_host()
    store = leases.open_store(app.config)
    try:
        ident, seen = _seen(this_host, session, kill.ID_DIGITS_TO_DISCARD)
    except LeaseNewer:
        raise
    except LeaseUnreadable as error:
        ident, before = _ident(this_host, session, kill.ID_DIGITS_TO_DISCARD), None
        _confirm(app, yes, [error.message, "A new lease will be written. If a host runs it, two copies may run."])
        after = leases.write_anew(store, this_host, ident, references.manifests(this_host, ident))
    else:
        before = seen.record.host
        if seen.record.state == "held":
            holder = f"{session} is held by {before} (token {seen.record.token})."
            _confirm(app, yes, [holder, "If that host is alive, two copies will run, and both may act on the outside."])
        answer = store.force_break(ident, app.config.host, this_host.instance())
        if isinstance(answer, Lost):
            raise Fenced(f"nothing to break: {answer}", "See: cmdop-migrate lease show " + session)
        after = answer.record
    this_host.events.emit("lease_broken", ident, token=after.token, before=before)
    if app.json:
        render.answer({"holder": None, "token": after.token, "ttl_s": 0, "state": after.state})
    else:
        render.line(f"{session}: now {after.state}, token {after.token}")


def _confirm(app: App, yes: bool, warnings: list[str]) -> None:
    if yes:
        return
    if app.json or not sys.stdin.isatty():
        raise Usage("breaking a lease must be confirmed", "Add --yes, if the holder is certainly dead.")
    for warning in warnings:
        render.note(warning)
    click.confirm("Is its host certainly dead?", abort=True, err=True)


def _ident(this_host: Host, reference: str, shortest: int = 1) -> str:
    """Return the session id of a session of this host, of one in the store, or of a whole id."""
    try:
        return this_host.find(reference).session
    except SessionNotFound:
        found = references.session_of(this_host, reference, shortest)
        if found is None and not is_session_id(reference):
            raise _unknown(reference) from None
        return found or reference


def _seen(this_host: Host, reference: str, shortest: int = 1) -> tuple[str, LeaseView]:
    ident = _ident(this_host, reference, shortest)
    seen = leases.open_store(this_host.config).inspect(ident)
    if seen is None:
        raise _unknown(reference)
    return ident, seen


def _unknown(reference: str) -> SessionNotFound:
    return SessionNotFound(
        f"the lease store has no session {reference!r}", "Give its full id, or see: cmdop-migrate ls"
    )


def _facts(seen: LeaseView) -> dict[str, Any]:
    record = seen.record
    return {
        "holder": record.host if record.state == "held" else None,
        "host": record.host,
        "token": record.token,
        "ttl_s": record.ttl,
        "state": record.state,
        "checkpoint": record.checkpoint,
        "renewals": record.renewals,
    }
