"""Report what would block moving a session."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import Blocked
from cmdop_migrate.migration import plan as migration_plan


@click.command()
@click.argument("session")
@click.option("--to", "host", metavar="HOST", help="The host to move it to [this one: a checkpoint and restore here].")
@click.option(
    "--carry",
    type=click.Choice(["none", "mapped", "opened"]),
    default="mapped",
    show_default=True,
    help="Host files that would travel along.",
)
@click.option("--accept", metavar="CHECK", multiple=True, help="Only warn about findings of this check. Repeatable.")
@command
def plan(app: App, session: str, host: str | None, carry: Any, accept: tuple[str, ...]) -> int:
    """Report what would block moving a session.

    Examines the session and both hosts; nothing is frozen or changed. Fails (exit 4) when something blocks the move.

    \b
    Examples:
      cmdop-migrate plan work
      cmdop-migrate plan work --to host-b
    """
    this_host = app.this_host()
    with render.progress(app.json) as show, migration_plan.host(this_host, host) as target:
        show("looking")
        answer = migration_plan.plan(this_host, session, target, carry, accept)
    if app.json:
        render.answer(answer.to_json())
    else:
        _show(answer)
    return 0 if answer.ok else Blocked.exit


def _show(answer: migration_plan.PlanResult) -> None:
    columns = shutil.get_terminal_size((100, 24)).columns
    render.findings([(finding.check, finding.level, finding.message) for finding in answer.findings], columns)
    for finding in answer.findings:
        if finding.level != "info":
            fix = f"{finding.check}: {render.printable(finding.fix)}"
            render.line("\n" + textwrap.fill(fix, columns, break_on_hyphens=False))
    way = f"from {answer.source} to {answer.target}" if answer.source != answer.target else f"on {answer.source}"
    count = len(answer.blockers)
    verdict = "can move" if answer.ok else f"cannot move: {count} {'blocker' if count == 1 else 'blockers'}"
    render.line(f"\n{answer.session.name} {way}: {verdict}")
