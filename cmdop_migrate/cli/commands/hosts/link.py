"""Run the connection of this host to its relay."""

from __future__ import annotations

import click

from cmdop_migrate.cli.app import App, command


@click.command(hidden=True)
@command
def link(app: App) -> None:
    """Connect this host to the relay; its agent runs this command.

    \b
    Examples:
      cmdop-migrate link
    """
    from cmdop_migrate.gateway import link_main

    link_main.serve(app.this_host(keeping=False))
