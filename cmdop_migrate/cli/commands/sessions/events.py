"""Print the event log of this host."""

from __future__ import annotations

import time

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command

FOLLOW_INTERVAL = 0.2  # seconds between two looks for new events


@click.command()
@click.argument("session", required=False)
@click.option("--follow", is_flag=True, help="Keep printing new events.")
@command
def events(app: App, session: str | None, follow: bool) -> None:
    """Print the events of this host, or of one session, as JSON lines.

    \b
    Examples:
      cmdop-migrate events
      cmdop-migrate events work --follow
    """
    this_host = app.this_host()
    ident = this_host.find(session).session if session is not None else None
    log = this_host.events
    for line in log.follow(ident, lambda: time.sleep(FOLLOW_INTERVAL)) if follow else log.read(ident):
        render.item(line)
