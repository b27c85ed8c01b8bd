"""Wait until a session prints a pattern, or ends."""

from __future__ import annotations

import click

from cmdop_migrate import units
from cmdop_migrate.cli import relay_options, render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.cli.relay_options import RelayOptions
from cmdop_migrate.errors import SessionExited
from cmdop_migrate.host import talk


@click.command()
@click.argument("session")
@click.option("--for", "pattern", metavar="REGEX", help="Wait until it has printed this.")
@click.option(
    "--from", "start", type=click.IntRange(min=0), metavar="SEQ", help="Search from this byte on [all that is kept]."
)
@click.option(
    "--timeout",
    type=units.duration,
    metavar="TIME",
    default="30s",
    show_default=True,
    help="Give up after this long: exit 11.",
)
@relay_options.through_relay
@command
def wait(app: App, session: str, pattern: str | None, start: int | None, timeout: float, relay: RelayOptions) -> int:
    """Wait until a session prints a pattern, or ends. Exits 4 if it ends without having printed the pattern.

    \b
    Examples:
      cmdop-migrate wait work --timeout 1h
      cmdop-migrate wait work --for 'listening on .*' --timeout 2m
    """
    place = relay_options.elsewhere(app, relay, session)
    if place is not None:
        from cmdop_migrate.gateway import client

        result = client.wait(place, session, pattern, timeout, start)
    else:
        result = talk.wait(app.this_host(), session, pattern, timeout, start)
    if app.json:
        render.answer(result)
    elif "matched" in result:
        render.line(result["matched"])
    else:
        render.line(result["reason"])
    return SessionExited.exit if pattern is not None and "matched" not in result else 0
