"""reap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from cmdop_migrate import units
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.drain import reap as reap_flow
from cmdop_migrate.errors import Partial, Usage


@click.command()
@click.option("--idle", type=units.duration, required=True, metavar="TIME", help="For how long nothing has happened.")
@click.option("--destroy", is_flag=True, help="End them, and keep nothing to bring them back from.")
@click.option("--dry-run", is_flag=True, help="Only say which.")
@command
def reap(app: App, idle: float, destroy: bool, dry_run: bool) -> int | None:
    """Park the sessions of this host that are idle.

    Idle: for that long no client was attached, nothing was typed or printed, and its processes used less than 1 % of
    a processor. They are checkpointed, then evicted; restore brings them back. It asks nothing: made for cron.

    \b
    Examples:
      cmdop-migrate reap --idle 24h
      cmdop-migrate reap --idle 7d --destroy --dry-run
    """
    if idle <= 0:
        raise Usage("--idle must be more than nothing", "For example 24h. To park all sessions, checkpoint each.")
    with render.progress(app.json) as show:
        result = reap_flow.reap(app.this_host(), idle, destroy, dry_run, show)
    error = _partial(result.failed)
    if app.json:
        render.answer({**asdict(result), **({"error": render.error_facts(error)} if error else {})})
        return error.exit if error else None
    if not result.reaped and not error:
        render.note(f"No session has been idle for {units.show_duration(idle)}.")
    if result.reaped:
        render.table(
            ("NAME", "SESSION", "IDLE", "WOULD BE" if dry_run else "IS NOW", "CHECKPOINT"),
            (
                (
                    reaped.name,
                    reaped.session[:12],
                    units.show_duration(reaped.idle_s),
                    reaped.how,
                    (reaped.checkpoint or "-")[:12],
                )
                for reaped in result.reaped
            ),
        )
    for left in result.left:
        render.note(f"{left.name}: no longer idle here; left alone")
    if error:
        raise error
    return None


def _partial(failed: Sequence[reap_flow.FailedSession]) -> Partial | None:
    if not failed:
        return None
    words = "; ".join(f"{one.name} ({one.error})" for one in failed)
    return Partial(f"{len(failed)} idle sessions could not be reaped: {words}", "They run on. Try one: checkpoint NAME")
