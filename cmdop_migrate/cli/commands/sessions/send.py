"""Type one input into a session."""

from __future__ import annotations

import click

from cmdop_migrate.cli import relay_options, render
from cmdop_migrate.cli.app import App, actor_name, command
from cmdop_migrate.cli.relay_options import RelayOptions
from cmdop_migrate.errors import Usage
from cmdop_migrate.host import talk

MAX_INPUT = 128 << 10


@click.command()
@click.argument("session")
@click.argument("text")
@click.option("--enter", is_flag=True, help="Press Enter after it.")
@click.option("--actor", metavar="NAME", help="Who is typing [you; through a relay, the credential's name].")
@relay_options.through_relay
@command
def send(app: App, session: str, text: str, enter: bool, actor: str | None, relay: RelayOptions) -> None:
    """Type one input into a session; it arrives whole.

    \b
    Examples:
      cmdop-migrate send work 'make test' --enter
      cmdop-migrate send work $'\\x03'                (Ctrl-C)
    """
    data = text.encode("utf-8", "surrogateescape") + (b"\r" if enter else b"")
    if not data:
        raise Usage("nothing to send", "Give some text, or --enter.")
    if len(data) > MAX_INPUT:
        raise Usage(f"too long for one input: {len(data)} bytes", "Send at most 128 KiB at a time.")
    place = relay_options.elsewhere(app, relay, session)
    if place is not None:
        from cmdop_migrate.gateway import client

        result = client.send(place, session, data)
    else:
        result = talk.send(app.this_host(), session, data, actor_name(actor))
    if app.json:
        render.answer(result)
