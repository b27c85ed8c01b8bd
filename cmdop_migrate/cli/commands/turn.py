"""turn, inputs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import click

from cmdop_migrate import units
from cmdop_migrate.cli import relay_options, render
from cmdop_migrate.cli.app import App, actor_name, command
from cmdop_migrate.errors import Usage
from cmdop_migrate.host import input_journal as journal
from cmdop_migrate.host import turn as host_turn


@click.command()
@click.argument("session")
@click.argument("do", type=click.Choice(get_args(host_turn.Do)), metavar="request|grant|release|seize|show")
@click.option("--actor", metavar="NAME", help="Who asks [you; through a relay, whom the credential names].")
@click.option("--to", metavar="NAME", help="grant: to whom [who waits longest].")
@click.option(
    "--timeout", type=units.duration, metavar="TIME", help="It lapses after so long without input of who has it [5m]."
)
@click.option("--freeze", is_flag=True, help="seize: the session stands still, too, until the turn is released.")
@click.option("--wait", type=units.duration, metavar="TIME", help="request: wait so long for it; then exit 11.")
@relay_options.through_relay
@command
def turn(
    app: App, session: str, do: host_turn.Do, actor: str | None, relay: tuple[str | None, Path | None], **options: Any
) -> None:
    """Ask for the write turn of a session, pass it on, give it back, or take it.

    Who has it is the only one who can type; while nobody has it, everyone can. A request that cannot be granted waits
    in a queue. seize takes it at once, and drops what others typed and the terminal has not got yet.

    \b
    Examples:
      cmdop-migrate turn work request --wait 5m
      cmdop-migrate turn work grant --to ann
      cmdop-migrate turn work seize --freeze
      cmdop-migrate turn work release
    """
    for name, only in (("to", "grant"), ("freeze", "seize"), ("wait", "request")):
        if options[name] and do != only:
            raise Usage(f"--{name} is for {only}", f"See: cmdop-migrate turn --help; {do} does not take it.")
    wait = options.pop("wait") or 0.0
    where = relay_options.elsewhere(app, relay, session)
    if where is not None:
        from cmdop_migrate.gateway import client

        result = client.turn(
            where, session, host_turn.TurnOptions(do, where.credential.claims.name, wait=wait, **options)
        )
    else:
        asked = host_turn.TurnOptions(do, actor_name(actor), wait=wait, **options)
        result = host_turn.turn(app.this_host(), session, asked)
    if app.json:
        render.answer(result)
        return
    render.line(render.printable(_words(result)))
    if do == "seize" and result["dropped"]:
        render.note(f"{result['dropped']} bytes that others had typed were dropped")
    if do in ("seize", "request") and result["granted"] and result["staged"]:
        staged = result["staged"]
        authors = render.printable(", ".join(staged["authors"]))
        render.note(f"the line has {staged['bytes']} bytes of {authors}, not committed; Ctrl-U clears it")


def _words(result: dict[str, Any]) -> str:
    if result["holder"] is None:
        return f"{result['name']}: nobody has the turn; everyone can write"
    words = f"{result['name']}: {result['holder']} has the turn"
    if result["frozen"]:
        words += ", and it stands still"
    elif result["left_s"] is not None:
        words += f" for {units.show_duration(result['left_s'])} without input"
    if "place" in result:
        words += f"; you are number {result['place']} of those who wait"
    elif result["queue"]:
        words += f"; waiting: {', '.join(result['queue'])}"
    return words


@click.command()
@click.argument("session")
@click.option("--verify", is_flag=True, help="Only check that nothing was changed, removed or put in: exit 7 if so.")
@command
def inputs(app: App, session: str, verify: bool) -> int:
    """Show what was typed into a session: who committed it, whose bytes are in it, and what the gate said.

    Every line is bound to the one before it, also across moves. The last 8 to 16 MiB are kept.

    \b
    Examples:
      cmdop-migrate inputs work
      cmdop-migrate inputs work --json | jq -r '.inputs[] | select(.gate == "refused")'
      cmdop-migrate inputs work --verify
    """
    this_host = app.this_host()
    record = this_host.find(session)
    if verify:
        verdict = journal.verify(this_host, record)
        if app.json:
            render.answer({"session": record.session, **journal.verdict_json(verdict)})
        elif verdict.ok:
            render.line(f"{record.name}: {verdict.lines} lines, {verdict.first or 0} to {verdict.last or 0}, whole")
        else:
            for broken in verdict.breaks:
                render.line(f"{record.name}: {broken.problem}")
        return 0 if verdict.ok else journal.BROKEN
    found = journal.journal(this_host, record)
    if app.json:
        render.answer({"session": record.session, "inputs": list(found)})
        return 0
    for one in found:
        render.line(render.printable(_line(one)))
    return 0


def _line(one: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(one.get("time", 0)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    start = f"{one['seq']:>6}  {at}  "
    if "turn" in one:
        words = f"turn: {one['turn']} by {one['actor']}; {one['holder'] or 'nobody'} has it"
        words += f", {one['dropped']} bytes dropped" if one["dropped"] else ""
        return start + words + (", frozen" if one["frozen"] else "")
    others = [name for name in one.get("originators", []) if name != one["actor"]]
    who = one["actor"] + (f" (with {', '.join(others)})" if others else "")
    text = "(secret)" if one.get("text") is None else one["text"].rstrip("\r\n")
    gate = f"  [{one['gate']}{': ' + one['why'] if one.get('why') else ''}]" if "gate" in one else ""
    return f"{start}{who}: {text}{gate}"
