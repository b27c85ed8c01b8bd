"""Request, grant, release or seize the write turn of a session."""

from __future__ import annotations

from typing import Any, get_args

import click

from cmdop_migrate import units
from cmdop_migrate.cli import relay_options, render
from cmdop_migrate.cli.app import App, actor_name, command
from cmdop_migrate.cli.relay_options import RelayOptions
from cmdop_migrate.errors import Usage
from cmdop_migrate.host import turn as host_turn


@click.command()
@click.argument("session")
@click.argument("do", type=click.Choice(get_args(host_turn.Do)), metavar="request|grant|release|seize|show")
@click.option("--actor", metavar="NAME", help="Who asks [you; through a relay, the credential's name].")
@click.option("--to", metavar="NAME", help="grant: to this actor [the first in the queue].")
@click.option("--timeout", type=units.duration, metavar="TIME", help="It expires after so long without input [5m].")
@click.option("--freeze", is_flag=True, help="seize: also freeze the session until the turn is released.")
@click.option("--wait", type=units.duration, metavar="TIME", help="request: wait so long for it; then exit 11.")
@relay_options.through_relay
@command
def turn(app: App, session: str, do: host_turn.Do, actor: str | None, relay: RelayOptions, **options: Any) -> None:
    """Request the write turn of a session, pass it on, release it, or seize it.

    Only the actor that has the turn can type; while no actor has it, all can. A request that cannot be granted waits in
    a queue. seize takes the turn immediately, and drops input of others that the terminal has not received yet.

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
    place = relay_options.elsewhere(app, relay, session)
    if place is not None:
        from cmdop_migrate.gateway import client

        result = client.turn(
            place, session, host_turn.TurnOptions(do, place.credential.claims.name, wait=wait, **options)
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
        return f"{result['name']}: no actor has the turn; all can write"
    words = f"{result['name']}: {result['holder']} has the turn"
    if result["frozen"]:
        words += ", and the session is frozen"
    elif result["left_s"] is not None:
        words += f" for {units.show_duration(result['left_s'])} without input"
    if "place" in result:
        words += f"; you are number {result['place']} in the queue"
    elif result["queue"]:
        words += f"; waiting: {', '.join(result['queue'])}"
    return words
