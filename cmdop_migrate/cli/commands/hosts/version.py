"""Show the version, and what hosts must have in common to move sessions."""

from __future__ import annotations

import os

import click

from cmdop_migrate import __version__
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command


@click.command()
@click.option("--places", is_flag=True, help="Also ask the store and the lease store for their ids.")
@command
def version(app: App, places: bool) -> None:
    """Show the version, and what another host must have in common with this one.

    Hosts that move sessions to each other need the same protocol, store, lease store and key.

    \b
    Examples:
      cmdop-migrate version
      cmdop-migrate version --places --json
    """
    from cmdop_migrate.migration import compatibility  # keeps `version --help` quick

    this_host = app.this_host(keeping=False) if os.geteuid() == 0 else None
    facts = compatibility.facts(app.config, this_host, places)
    if app.json:
        render.answer(facts)
        return
    render.line(f"cmdop-migrate {__version__}, protocol {facts['protocol']}, on {facts['host']}")
    for kind in ("store", "lease"):
        place = facts[kind]
        render.line(f"  {kind:<6} {place['url']}" + (f"  ({place['id']})" if place["id"] else ""))
    render.line(f"  {'keys':<6} {', '.join(key[:16] for key in facts['keys']) or 'none yet'}")
