"""Attach this terminal to a session, on this host or through a relay."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from cmdop_migrate.cli import relay_options, render
from cmdop_migrate.cli.app import App, actor_name, command
from cmdop_migrate.cli.relay_options import RelayOptions
from cmdop_migrate.errors import Usage
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.session import attach as session_attach
from cmdop_migrate.session.holder_client import exited

if TYPE_CHECKING:
    from cmdop_migrate.gateway.client import RelayAccess


@click.command()
@click.argument("session")
@click.option("--read-only", is_flag=True, help="Watch only; your input is not sent.")
@click.option(
    "--from",
    "start",
    type=click.IntRange(min=0),
    metavar="SEQ",
    help="Show output from this byte on [all that is kept].",
)
@click.option("--actor", metavar="NAME", help="Who is typing [you; through a relay, the credential's name].")
@relay_options.through_relay
@command
def attach(app: App, session: str, read_only: bool, start: int | None, actor: str | None, relay: RelayOptions) -> None:
    """Attach this terminal to a session; Ctrl-\\ d detaches.

    The screen is shown as it was; the session keeps running when you detach. Several clients may be attached at the
    same time. Press Ctrl-\\ twice to type one.

    \b
    Examples:
      cmdop-migrate attach work
      cmdop-migrate attach work --read-only
      cmdop-migrate attach work --relay wss://relay.example:7443 --credential ~/relay.credential
    """
    if app.json:
        raise Usage("attach is for terminals", "Programs use: send, output, wait")
    place = relay_options.elsewhere(app, relay, session)
    if place is not None:
        _attach_through_relay(place, session, read_only, start)
        return
    attach_here(app.this_host(), session, actor_name(actor), read_only, start)


def _attach_through_relay(place: RelayAccess, session: str, read_only: bool, start: int | None) -> None:
    from cmdop_migrate.gateway import client

    found, outcome = client.attach(place, session, read_only, start, sys.stdin.fileno(), sys.stdout.fileno())
    if outcome.kind == "exited":
        render.note(f"[{found.name}: {outcome.detail.get('reason', 'ended')}]")
    else:
        render.note(f"[detached from {found.name} at byte {outcome.seq}]")


def attach_here(this_host: Host, session: str, actor: str, read_only: bool, start: int | None) -> None:
    """Attach to a session of this host until the client detaches or the session ends. Raise SessionExited, or the error
    that tells where the session went, if the connection to its holder is lost."""
    record, channel = talk.open_channel(this_host, session)
    with channel:
        outcome = session_attach.attach(channel, actor, read_only, start, sys.stdin.fileno(), sys.stdout.fileno())
    if outcome.kind == "exited":
        render.note(f"[{record.name}: {outcome.detail.get('reason', 'ended')}]")
    elif outcome.kind == "lost":
        after = talk.after_loss(this_host, record)
        raise exited(record.name, after.exit, after.phase)
    else:
        render.note(
            f"[detached from {record.name} at byte {outcome.seq}; come back with: cmdop-migrate attach {record.name}]"
        )
