"""Checkpoint a session to the store."""

from __future__ import annotations

from typing import Any

import click

from cmdop_migrate import clock, units
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.cli.options import CARRY, WAIT_QUIET
from cmdop_migrate.snapshot import checkpoint as snapshot_checkpoint
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions


@click.command()
@click.argument("session")
@click.option("--leave-running", is_flag=True, help="Keep the session running here; the checkpoint is a copy.")
@click.option("--tag", metavar="TEXT", help="A word to find the checkpoint by.")
@CARRY
@WAIT_QUIET
@click.option("--no-prove", is_flag=True, help="Park the session without a trial restore of the checkpoint.")
@click.option(
    "--deadline",
    type=units.duration,
    metavar="TIME",
    help="Park within this time: the trial restore is skipped if it would take longer.",
)
@command
def checkpoint(
    app: App,
    session: str,
    leave_running: bool,
    no_prove: bool,
    deadline: float | None,
    **options: Any,
) -> None:
    """Save a session to the store; it is then parked.

    The session is frozen, dumped and shipped. Before it is ended, the checkpoint is restored on trial, up to its first
    instruction. If that or anything else fails, the session resumes here. With --leave-running it resumes in any case.

    \b
    Examples:
      cmdop-migrate checkpoint work
      cmdop-migrate checkpoint work --leave-running --tag before-upgrade
      cmdop-migrate checkpoint work --wait-quiet 30s
    """
    until = None if deadline is None else clock.boottime() + deadline
    checkpoint_options = CheckpointOptions(leave_running, prove=not no_prove, deadline=until, **options)
    with render.progress(app.json) as show:
        result = snapshot_checkpoint.checkpoint(app.this_host(), session, checkpoint_options, show)
    facts = result.to_json()
    if app.json:
        render.answer(facts)
        return
    render.hooks(False, facts["hooks"])
    size = facts["bytes"]
    render.line(f"{session}: {'saved' if leave_running else 'parked'} as {facts['checkpoint']}")
    render.line(
        f"  frozen {facts['frozen_s']:.2f} s; memory {units.show_size(size['memory'])}, files"
        f" {units.show_size(size['files'])}, sent {units.show_size(size['new'])}"
    )
    for closed in facts["closed_connections"]:
        verb = "will be closed on restore" if leave_running else "closed"
        render.line(f"  {verb}: {closed['command']} {closed['local']} -> {closed['remote']}")
    if not leave_running:
        seconds = facts["phases"].get("prove", 0.0)
        proof = f"restored on trial in {seconds:.2f} s" if facts["proved"] else f"not proven: {facts['skipped']}"
        render.line(f"  {proof}")
        render.line(f"  restore it with: cmdop-migrate restore {session}")
