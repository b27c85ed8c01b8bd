"""Accept sessions again after a drain, and move back those it moved away."""

from __future__ import annotations

from typing import Any

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.cli.commands.moves.drain import entry_words
from cmdop_migrate.drain import undrain as drain_undrain
from cmdop_migrate.errors import Partial
from cmdop_migrate.host.drain_journal import Entry
from cmdop_migrate.util import signals as stopping


@click.command()
@click.option("--bring-back", is_flag=True, help="Move or restore back what the drain moved and parked.")
@click.option(
    "--parallel",
    type=click.IntRange(1, 4),
    default=2,
    show_default=True,
    metavar="N",
    help="Sessions at the same time.",
)
@click.option(
    "--accept",
    multiple=True,
    metavar="CHECK",
    help="Move back even if this check of the plan there blocks. Repeatable.",
)
@command
def undrain(app: App, bring_back: bool, parallel: int, accept: tuple[str, ...]) -> int:
    """Accept sessions again after a drain.

    With --bring-back each host that took a session moves it back here: it must know this host by its name.

    \b
    Examples:
      cmdop-migrate undrain
      cmdop-migrate undrain --bring-back
      cmdop-migrate undrain --bring-back --accept kernel
    """

    def tell(entry: Entry) -> None:
        if not app.json:
            render.line(entry_words(entry if entry.state in ("back", "ended") else _not_back(entry)))

    with stopping.on_signals() as stop:
        options = drain_undrain.UndrainOptions(bring_back, parallel, accept)
        result = drain_undrain.undrain(app.this_host(), options, app.global_flags(), stop, tell)
    error = None
    failed = result.of(*drain_undrain.AWAY)
    if failed:
        words = "; ".join(f"{entry.name} ({entry.why})" for entry in failed)
        error = Partial(f"{len(failed)} are not back: {words}", "Again: cmdop-migrate undrain --bring-back")
    if app.json:
        render.answer({**_undrain_json(result), **render.error_field(error)})
        return error.exit if error else 0
    back_now = f"; {len(result.of('back'))} back" if bring_back else ""
    ended = f", {len(result.of('ended'))} ended meanwhile" if result.of("ended") else ""
    accepted = "sessions are accepted again" if result.was_draining else "was not drained"
    render.line(f"{app.config.host}: {accepted}{back_now}{ended}")
    if not bring_back and result.away:
        render.note(f"{len(result.away)} are away; move them back with: cmdop-migrate undrain --bring-back")
    if error:
        raise error
    return 0


def _undrain_json(result: drain_undrain.UndrainResult) -> dict[str, Any]:
    lists = {"restored": result.of("back"), "failed": result.of(*drain_undrain.AWAY), "ended": result.of("ended")}
    return {
        "was_draining": result.was_draining,
        **{word: [entry.to_json() for entry in entries] for word, entries in lists.items()},
        "away": [entry.to_json() for entry in result.away],
    }


def _not_back(entry: Entry) -> Entry:
    return Entry(entry.session, entry.name, "going", entry.to, entry.why)
