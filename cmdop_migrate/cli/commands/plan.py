"""plan, and the question one host asks another for it."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any, BinaryIO

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import Blocked, ImageRefused, Usage
from cmdop_migrate.migration import gather_facts
from cmdop_migrate.migration import plan as flow
from cmdop_migrate.preflight.facts.host import HostQuery
from cmdop_migrate.preflight.findings import Finding

MAX_ASK = 64 << 20


@click.command()
@click.argument("session")
@click.option("--to", "host", metavar="HOST", help="The host it is to move to; without it, back to this one.")
@click.option(
    "--carry",
    type=click.Choice(["none", "mapped", "opened"]),
    default="mapped",
    show_default=True,
    help="Host files that would travel along.",
)
@click.option("--accept", metavar="CHECK", multiple=True, help="Only warn of what this check finds; may be repeated.")
@command
def plan(app: App, session: str, host: str | None, carry: Any, accept: tuple[str, ...]) -> int:
    """What stands in the way of moving a session.

    Looks at the session and at both hosts; nothing is frozen or changed. Fails (exit 4) when something blocks the move.

    \b
    Examples:
      cmdop-migrate plan work
      cmdop-migrate plan work --to host-b
    """
    this_host = app.this_host()
    with render.progress(app.json) as show, flow.host(this_host, host) as target:
        show("looking")
        answer = flow.plan(this_host, session, target, carry, accept)
    if app.json:
        render.answer(answer.to_json())
    else:
        _show(answer)
    return 0 if answer.ok else Blocked.exit


def _show(answer: flow.PlanResult) -> None:
    columns = shutil.get_terminal_size((100, 24)).columns
    taken = max(len(one.check) for one in answer.findings) + 9
    rows = [row for one in answer.findings for row in _rows(one, max(30, columns - taken))]
    render.table(("CHECK", "LEVEL", "WHAT"), rows)
    for one in answer.findings:
        if one.level != "info":
            render.line(
                "\n" + textwrap.fill(f"{one.check}: {render.printable(one.fix)}", columns, break_on_hyphens=False)
            )
    way = f"from {answer.source} to {answer.target}" if answer.source != answer.target else f"on {answer.source}"
    count = len(answer.blockers)
    verdict = (
        "can move"
        if answer.ok
        else f"cannot move: {count} {'thing stands' if count == 1 else 'things stand'} in the way"
    )
    render.line(f"\n{answer.session.name} {way}: {verdict}")


def _rows(finding: Finding, room: int) -> Iterator[tuple[str, str, str]]:
    first, *rest = textwrap.wrap(finding.message, room, break_on_hyphens=False) or [""]
    yield finding.check, finding.level, first
    yield from (("", "", line) for line in rest)


@click.command(hidden=True)
@click.option("--for", "asked", type=click.File("rb"), default="-", help="What is asked, as JSON; `-` is stdin.")
@command
def facts(app: App, asked: BinaryIO) -> None:
    """This host's facts for a move: what another host's `plan` asks over SSH.

    \b
    Examples:
      cmdop-migrate facts --json --for ask.json
    """
    data = asked.read(MAX_ASK)
    try:
        ask = HostQuery.from_json(json.loads(data))
        found = gather_facts.gather_host(app.this_host(keeping=False), ask)
    except (ValueError, ImageRefused) as error:
        raise Usage(f"not a question about a host: {error}", "It is asked by: cmdop-migrate plan --to HOST") from error
    render.answer(found.to_json())
