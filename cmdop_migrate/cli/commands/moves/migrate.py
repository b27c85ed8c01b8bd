"""Move a running session to another host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli import report as report_page
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.cli.options import WAIT_QUIET
from cmdop_migrate.errors import Usage
from cmdop_migrate.migration import migrate as migration_migrate
from cmdop_migrate.migration import peers
from cmdop_migrate.migration.migrate_options import MigrateOptions
from cmdop_migrate.util.progress import Report


@click.command()
@click.argument("session")
@click.option("--to", "host", metavar="HOST", required=True, help="The host to move it to; see `hosts`.")
@click.option(
    "--pre-ship", type=int, default=0, metavar="N", help="Pre-copy memory N times while it runs: a shorter freeze."
)
@click.option("--lazy", is_flag=True, help="Start there while memory is still in the store; a lost store stalls it.")
@click.option(
    "--accept", multiple=True, metavar="CHECK", help="Move it even if this check of the plan blocks. Repeatable."
)
@WAIT_QUIET
@click.option("--report", type=click.Path(path_type=Path), metavar="FILE.html", help="Write the timings as a page.")
@click.option("--progress", is_flag=True, help="With --json: progress lines before the result object.")
@command
def migrate(app: App, session: str, host: str, report: Path | None, progress: bool, **options: Any) -> None:
    """Move a running session to another host.

    The session is frozen, shipped and restored there. Its copy here stays frozen until the session runs there, and
    resumes if it cannot.

    \b
    Examples:
      cmdop-migrate migrate work --to host-b
      cmdop-migrate migrate work --to host-b --pre-ship 2
    """
    if host == app.config.host:
        raise Usage(f"{host} is this host itself", "Name another one; see: cmdop-migrate hosts ls")
    this_host = app.this_host()
    wanted = MigrateOptions(**options)
    migration_migrate.check(this_host, session, wanted)  # before another host is contacted
    if report is not None and not (os.access(report.absolute().parent, os.W_OK) and not report.is_dir()):
        raise Usage(f"cannot write {report}", "Name a file in a directory that exists.")
    title = f"{session} to {host}"
    with peers.pool(app.config) as pool, render.bar(title, not app.json, app.json and progress) as show:

        def tell(state: Report) -> None:
            show(state.words, state.done, state.eta_s, state.to_json())

        result = migration_migrate.migrate(this_host, session, peers.checked_peer(this_host, pool, host), wanted, tell)
    if report is not None:
        try:
            report.write_text(report_page.page(result.to_json()), encoding="utf-8")
        except OSError as error:  # the session has moved: the answer must say so
            render.note(f"warning: cannot write {report}: {error.strerror}")
    if app.json:
        render.answer(result.to_json())
        return
    render.hooks(False, result.hooks)
    render.line(f"{result.name}: moved to {result.target} (token {result.token}), in {result.took_s:.2f} s")
    if result.downtime_s is not None:
        render.line(f"  frozen {result.frozen_s:.2f} s; no output for {result.downtime_s:.2f} s")
    for closed in result.shipped.closed:
        render.line(f"  closed: {closed['command']} {closed['local']} -> {closed['remote']}")
