"""Finish or undo interrupted migrations."""

from __future__ import annotations

from collections.abc import Sequence

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import CmdopError, Partial
from cmdop_migrate.host.move_journal import Move
from cmdop_migrate.migration import peers
from cmdop_migrate.migration import resume as migration_resume

_ENDS = {
    "on_source": "runs here",
    "on_target": "runs there",
    "parked": "is parked in the store",
    "exited": "has ended",
}


@click.command()
@click.argument("migration", required=False)
@command
def resume(app: App, migration: str | None) -> int:
    """Finish or undo interrupted migrations, and report where each session is.

    \b
    Examples:
      cmdop-migrate resume
    """
    this_host = app.this_host()
    with peers.pool(app.config) as pool, render.progress(app.json) as show:
        result = migration_resume.resume(
            this_host, migration, lambda name: peers.checked_peer(this_host, pool, name), show
        )
    done, failed = result.done, result.failed
    if failed and not done and len(failed) == 1:
        raise failed[0][1]
    error = _unknown(done, failed) if failed else None
    if app.json:
        render.answer({"migrations": [move.to_json() for move in done], **render.error_field(error)})
        return error.exit if error else 0
    for move in done:
        render.line(_words(move))
    if not done and not failed:
        render.note("Nothing to resume.")
    if error:
        raise error
    return 0


def _unknown(done: Sequence[Move], failed: Sequence[tuple[Move, CmdopError]]) -> Partial:
    names = ", ".join(f"{move.name} ({error.message})" for move, error in failed)
    ended = f"; ended: {', '.join(map(_words, done))}" if done else ""
    return Partial(f"not known yet: {names}{ended}", "Run it again later: cmdop-migrate resume")


def _words(move: Move) -> str:
    return f"{move.id}: {move.name} to {move.target}: it {_ENDS[str(move.end)]}"
