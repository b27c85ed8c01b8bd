"""List, show, verify and prune the checkpoints in the store."""

from __future__ import annotations

import time

import click

from cmdop_migrate import units
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import Usage
from cmdop_migrate.snapshot import checkpoints as snapshot_checkpoints
from cmdop_migrate.snapshot import prune as snapshot_prune


@click.group(epilog="Example: cmdop-migrate checkpoints ls work")
def checkpoints() -> None:
    """List, show, verify or prune the checkpoints in the store."""


@checkpoints.command("ls")
@click.argument("session", required=False)
@command
def list_checkpoints(app: App, session: str | None) -> None:
    """List the checkpoints this host's keys can read.

    \b
    Examples:
      cmdop-migrate checkpoints ls
    """
    found = snapshot_checkpoints.listing(app.this_host(), session)
    if app.json:
        render.answer({"checkpoints": [row.to_json() for row in found]})
        return
    if not found:
        render.note("No checkpoints.")
        return
    render.table(
        ("CHECKPOINT", "SESSION", "NAME", "HOST", "TOKEN", "AGE", "MEMORY", "STORED", "TAG"),
        (
            (
                row.checkpoint[:12],
                row.session[:12],
                row.name,
                row.host,
                str(row.token),
                units.show_duration(max(0.0, time.time() - row.created)),
                units.show_size(row.bytes["memory"]) if row.bytes else "-",
                units.show_size(row.bytes["stored"]) if row.bytes else "-",
                row.tag or row.problem or "",
            )
            for row in found
        ),
    )


@checkpoints.command("show")
@click.argument("checkpoint")
@command
def show_checkpoint(app: App, checkpoint: str) -> None:
    """Show one checkpoint: its session, contents and needs.

    \b
    Examples:
      cmdop-migrate checkpoints show 3f9c
    """
    facts = snapshot_checkpoints.show(app.this_host(), checkpoint)
    if app.json:
        render.answer(facts)
        return
    for key, value in facts.items():
        render.line(render.printable(f"{key:<12} {value}"))


@checkpoints.command("verify")
@click.argument("checkpoint", required=False)
@command
def verify_checkpoint(app: App, checkpoint: str | None) -> None:
    """Re-read every byte of a checkpoint, or of all, and report damage.

    \b
    Examples:
      cmdop-migrate checkpoints verify
    """
    results = snapshot_checkpoints.verify(app.this_host(), checkpoint)
    bad = [result for result in results if result.problem]
    if app.json and not bad:
        render.answer({"verified": [result.to_json() for result in results]})
    for result in [] if app.json else results:
        words = result.problem or "whole: " + units.show_size(result.bytes)
        render.line(f"{result.checkpoint[:12]}  {words}")
    if bad:
        raise snapshot_checkpoints.damaged(bad)


@checkpoints.command("prune")
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the newest N of each session.")
@click.option("--keep-within", type=units.duration, metavar="TIME", help="Keep those younger than this.")
@click.option("--drop", multiple=True, metavar="CHECKPOINT", help="Remove this one, regardless of the other rules.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@command
def prune(app: App, keep_last: int | None, keep_within: float | None, drop: tuple[str, ...], dry_run: bool) -> None:
    """Remove the checkpoints that no rule keeps.

    The newest of a parked session is always kept.

    \b
    Examples:
      cmdop-migrate checkpoints prune --keep-last 3 --keep-within 7d
    """
    if keep_last is None and keep_within is None and not drop:
        raise Usage("no rule says what to keep", "For example: --keep-last 3 --keep-within 7d")
    result = snapshot_prune.prune(app.this_host(), keep_last, keep_within, drop, dry_run)
    if app.json:
        render.answer(result.to_json())
        return
    verb = "would be removed" if dry_run else "removed"
    render.line(f"{len(result.checkpoints)} checkpoints {verb}, {units.show_size(result.bytes)} freed")
    if result.unreadable:
        count = len(result.unreadable)
        render.note(f"{count} manifests cannot be read with this host's keys: nothing they may need was removed")
