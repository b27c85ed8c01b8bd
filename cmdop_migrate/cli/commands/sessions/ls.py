"""List sessions: of this host, of all hosts, or those reachable through a relay."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from cmdop_migrate import units
from cmdop_migrate.cli import relay_options, render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.cli.relay_options import RelayOptions
from cmdop_migrate.host import drain_journal, listing

if TYPE_CHECKING:
    from cmdop_migrate.gateway.client import RelayAccess


@click.command()
@click.option("--all-hosts", is_flag=True, help="Sessions of every host that shares the lease store.")
@relay_options.through_relay
@command
def ls(app: App, all_hosts: bool, relay: RelayOptions) -> None:
    """List the sessions of this host, of all hosts, or those you may use through a relay.

    Ended sessions stay listed for a day (setting keep_exited), or until: cmdop-migrate kill.

    \b
    Examples:
      cmdop-migrate ls
      cmdop-migrate ls --json | jq -r '.sessions[] | select(.state == "running") | .name'
      cmdop-migrate ls --relay wss://relay.example:7443 --credential ~/relay.credential
    """
    place = relay_options.elsewhere(app, relay)
    if place is not None:
        _list_through_relay(app, place)
        return
    sessions = listing.list_everywhere(app.this_host()) if all_hosts else listing.list_here(app.this_host())
    drained = drain_journal.read_flag(app.config.state_dir)
    if app.json:
        rows = [asdict(session) for session in sessions]
        render.answer({"sessions": rows, **({"draining": asdict(drained)} if drained else {})})
        return
    if drained:
        render.note("This host is draining; it starts no session until: cmdop-migrate undrain")
    if not sessions:
        render.note("No sessions. Start one with: cmdop-migrate run --name work -- bash")
        return
    render.table(
        ("NAME", "SESSION", *(["HOST"] if all_hosts else []), "STATE", "CLIENTS", "IDLE", "MEMORY", "COMMAND"),
        (
            (
                session.name,
                session.session[:12],
                *([session.host] if all_hosts else []),
                state_words(session.state, session.note),
                "-" if session.clients is None else str(session.clients),
                units.show_duration(session.idle_s) if session.idle_s is not None else "-",
                units.show_size(session.rss) if session.rss else "-",
                shlex.join(session.command),
            )
            for session in sessions
        ),
    )


def _list_through_relay(app: App, place: RelayAccess) -> None:
    from cmdop_migrate.gateway import client

    sessions = client.list_all(place)
    if app.json:
        render.answer({"sessions": sessions})
    elif not sessions:
        render.note("No sessions for this credential.")
    else:
        columns = ("name", "session", "host", "state", "clients")
        rows = [[session[key] for key in columns] for session in sessions]
        for row in rows:
            row[1] = row[1][:12]
        render.table([key.upper() for key in columns], [["-" if c is None else str(c) for c in row] for row in rows])


def state_words(state: str, note: str) -> str:
    """Return the state of a session for people: `running`, `exited 0`, `exited (its holder died)`."""
    if not note or note.startswith(state):
        return note or state
    return f"{state} ({note})"
