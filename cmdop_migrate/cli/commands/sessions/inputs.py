"""Show or verify the input journal of a session."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.host import input_journal


@click.command()
@click.argument("session")
@click.option("--verify", is_flag=True, help="Only check that no line was changed, removed or inserted: exit 7 if so.")
@command
def inputs(app: App, session: str, verify: bool) -> int:
    """Show what was typed into a session: who committed it, who typed it, and what the gate decided.

    Every line is chained to the one before it, also across moves. The last 8 to 16 MiB are kept.

    \b
    Examples:
      cmdop-migrate inputs work
      cmdop-migrate inputs work --json | jq -r '.inputs[] | select(.gate == "refused")'
      cmdop-migrate inputs work --verify
    """
    this_host = app.this_host()
    record = this_host.find(session)
    if verify:
        verdict = input_journal.verify(this_host, record)
        if app.json:
            render.answer({"session": record.session, **input_journal.verdict_json(verdict)})
        elif verdict.ok:
            render.line(f"{record.name}: {verdict.lines} lines, {verdict.first or 0} to {verdict.last or 0}, whole")
        else:
            for broken in verdict.breaks:
                render.line(f"{record.name}: {broken.problem}")
        return 0 if verdict.ok else input_journal.BROKEN
    lines = input_journal.journal(this_host, record)
    if app.json:
        render.answer({"session": record.session, "inputs": list(lines)})
        return 0
    for line in lines:
        render.line(render.printable(_words(line)))
    return 0


def _words(line: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(line.get("time", 0)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    start = f"{line['seq']:>6}  {at}  "
    if "turn" in line:
        words = f"turn: {line['turn']} by {line['actor']}; {line['holder'] or 'no actor'} has it"
        words += f", {line['dropped']} bytes dropped" if line["dropped"] else ""
        return start + words + (", frozen" if line["frozen"] else "")
    others = [name for name in line.get("originators", []) if name != line["actor"]]
    who = line["actor"] + (f" (with {', '.join(others)})" if others else "")
    text = "(secret)" if line.get("text") is None else line["text"].rstrip("\r\n")
    gate = f"  [{line['gate']}{': ' + line['why'] if line.get('why') else ''}]" if "gate" in line else ""
    return f"{start}{who}: {text}{gate}"
