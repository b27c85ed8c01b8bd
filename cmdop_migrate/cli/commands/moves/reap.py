"""Park or end the idle sessions of this host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from cmdop_migrate import units
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.drain import reap as drain_reap
from cmdop_migrate.errors import Partial, Usage


@click.command()
@click.option("--idle", type=units.duration, required=True, metavar="TIME", help="Minimum idle time.")
@click.option("--destroy", is_flag=True, help="End them without a checkpoint: they cannot be restored.")
@click.option("--dry-run", is_flag=True, help="Only show which.")
@command
def reap(app: App, idle: float, destroy: bool, dry_run: bool) -> int | None:
    """Park the sessions of this host that are idle.

    Idle: for that long no client was attached, no input or output happened, and the processes used less than 1 % of
    a processor. Idle sessions are checkpointed, then evicted; `restore` resumes them. Asks nothing: made for cron.

    \b
    Examples:
      cmdop-migrate reap --idle 24h
      cmdop-migrate reap --idle 7d --destroy --dry-run
    """
    if idle <= 0:
        raise Usage("--idle must be greater than zero", "For example 24h. To park all sessions, checkpoint each.")
    with render.progress(app.json) as show:
        result = drain_reap.reap(app.this_host(), idle, destroy, dry_run, show)
    error = _partial(result.failed)
    if app.json:
        render.answer({**asdict(result), **render.error_field(error)})
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


def _partial(failed: Sequence[drain_reap.FailedSession]) -> Partial | None:
    if not failed:
        return None
    words = "; ".join(f"{session.name} ({session.error})" for session in failed)
    return Partial(
        f"{len(failed)} idle sessions could not be reaped: {words}", "They keep running. Try one: checkpoint NAME"
    )
