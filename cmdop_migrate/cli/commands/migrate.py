"""migrate, resume."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli import report as report_page
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.cli.options import WAIT_QUIET
from cmdop_migrate.errors import CmdopError, Partial, Usage
from cmdop_migrate.host.move_journal import Move
from cmdop_migrate.migration import migrate as migrate_flow
from cmdop_migrate.migration import peers
from cmdop_migrate.migration import resume as resume_flow
from cmdop_migrate.migration.migrate_options import MigrateOptions
from cmdop_migrate.util.progress import Report

_WHERE = {
    "on_source": "goes on here",
    "on_target": "runs there",
    "parked": "is parked in the store",
    "exited": "has ended",
}


@click.command()
@click.argument("session")
@click.option("--to", "host", metavar="HOST", required=True, help="Where it is to go; see `hosts`.")
@click.option(
    "--pre-ship", type=int, default=0, metavar="N", help="Send it N times ahead while it runs: the freeze is shorter."
)
@click.option("--lazy", is_flag=True, help="It runs there while memory is still in the store; a lost store stalls it.")
@click.option(
    "--accept", multiple=True, metavar="CHECK", help="Go on though this check of the plan blocks. Repeatable."
)
@WAIT_QUIET
@click.option("--report", type=click.Path(path_type=Path), metavar="FILE.html", help="Write what it cost as a page.")
@click.option("--progress", is_flag=True, help="With --json: lines of progress, before the one object.")
@command
def migrate(app: App, session: str, host: str, report: Path | None, progress: bool, **options: Any) -> None:
    """Move a running session to another host.

    It is frozen, shipped and restored there; its copy here stays until it runs there, and goes on if it cannot.

    \b
    Examples:
      cmdop-migrate migrate work --to host-b
      cmdop-migrate migrate work --to host-b --pre-ship 2
    """
    if host == app.config.host:
        raise Usage(f"{host} is this host itself", "Name another one; see: cmdop-migrate hosts ls")
    this_host = app.this_host()
    wanted = MigrateOptions(**options)
    migrate_flow.check(this_host, session, wanted)  # what cannot be meant is said before anybody is called
    if report is not None and not (os.access(report.absolute().parent, os.W_OK) and not report.is_dir()):
        raise Usage(f"cannot write {report}", "Name a file in a directory that exists.")
    title = f"{session} to {host}"
    with peers.pool(app.config) as pool, render.bar(title, not app.json, app.json and progress) as show:

        def tell(one: Report) -> None:
            show(one.words, one.done, one.eta_s, one.to_json())

        result = migrate_flow.migrate(this_host, session, peers.checked_peer(this_host, pool, host), wanted, tell)
    if report is not None:
        try:
            report.write_text(report_page.page(result.to_json()), encoding="utf-8")
        except OSError as error:  # it has moved: that is what must be said
            render.note(f"warning: cannot write {report}: {error.strerror}")
    if app.json:
        render.answer(result.to_json())
        return
    render.hooks(False, result.hooks)
    render.line(f"{result.name}: moved to {result.target} (token {result.token}), in {result.took_s:.2f} s")
    if result.downtime_s is not None:
        render.line(f"  frozen {result.frozen_s:.2f} s; nothing came out of it for {result.downtime_s:.2f} s")
    for connection in result.shipped.closed:
        render.line(f"  closed: {connection['command']} {connection['local']} -> {connection['remote']}")


@click.command()
@click.argument("migration", required=False)
@command
def resume(app: App, migration: str | None) -> int:
    """Finish or undo what was interrupted, and say where each session is.

    \b
    Examples:
      cmdop-migrate resume
    """
    this_host = app.this_host()
    with peers.pool(app.config) as pool, render.progress(app.json) as show:
        result = resume_flow.resume(this_host, migration, lambda name: peers.checked_peer(this_host, pool, name), show)
    done, failed = result.done, result.failed
    if failed and not done and len(failed) == 1:
        raise failed[0][1]
    error = _unknown(done, failed) if failed else None
    if app.json:
        facts = {"migrations": [one.to_json() for one in done]}
        render.answer({**facts, **({"error": render.error_facts(error)} if error else {})})
        return error.exit if error else 0
    for one in done:
        render.line(_words(one))
    if not done and not failed:
        render.note("Nothing to resume.")
    if error:
        raise error
    return 0


def _unknown(done: Sequence[Move], failed: Sequence[tuple[Move, CmdopError]]) -> Partial:
    names = ", ".join(f"{one.name} ({error.message})" for one, error in failed)
    told = f"; ended: {', '.join(map(_words, done))}" if done else ""
    return Partial(f"not known yet: {names}{told}", "Run it again later: cmdop-migrate resume")


def _words(one: Move) -> str:
    return f"{one.id}: {one.name} to {one.target}: it {_WHERE[str(one.end)]}"
