"""Fork a running session into a second one."""

from __future__ import annotations

import click

from cmdop_migrate.cli import render, target_host
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.snapshot import fork as snapshot_fork


@click.command()
@click.argument("session")
@click.argument("name")
@click.option("--to", "host", metavar="HOST", help="Start the fork on another host; see `hosts`.")
@command
def fork(app: App, session: str, name: str, host: str | None) -> None:
    """Fork a running session into a second one.

    The new session resumes from the same point, under its own identity; both run.

    \b
    Examples:
      cmdop-migrate fork work experiment
    """
    this_host = app.this_host()
    with target_host.connected(app, this_host, host) as target, render.progress(app.json) as show:
        if target is None:
            result = snapshot_fork.fork(this_host, session, name, show)
        else:
            from cmdop_migrate.migration import remote_restore

            result = remote_restore.fork(this_host, session, name, target, show)
    if app.json:
        render.answer(result.to_json())
    else:
        render.hooks(False, result.hooks)
        render.line(f"{name}: a fork of {session}; attach with: cmdop-migrate attach {name}")
