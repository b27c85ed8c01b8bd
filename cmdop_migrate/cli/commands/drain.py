"""drain, undrain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from cmdop_migrate import units
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.drain import drain as flow
from cmdop_migrate.drain import undrain as back
from cmdop_migrate.drain.drain_options import Said, Wanted
from cmdop_migrate.errors import Partial, Usage
from cmdop_migrate.host.drain_journal import Entry
from cmdop_migrate.util import signals as stopping


def _hosts(_ctx: click.Context, _option: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(name for one in value for part in one.split(",") if (name := part.strip()))
    if value and not found:  # a variable that is not set is not the wish to go anywhere
        raise Usage("--to names no host", "Name some, or leave --to out: then all known hosts are meant.")
    return found


@click.command()
@click.option(
    "--to", "hosts", metavar="HOST[,HOST]", multiple=True, callback=_hosts, help="Where to [all known hosts]."
)
@click.option("--deadline", type=units.duration, metavar="TIME", help="When all must be over [no limit].")
@click.option("--park", is_flag=True, help="Move nothing: all go to the store.")
@click.option("--dry-run", is_flag=True, help="Only show the schedule.")
@click.option("--parallel", type=int, default=2, show_default=True, metavar="N", help="So many at once, at most 4.")
@click.option("--bandwidth", type=units.size, metavar="SIZE", help="Bytes a second to the store, all together.")
@click.option("--memory", type=units.size, metavar="SIZE", help="Of all under way together [half of what is free].")
@command
def drain(app: App, dry_run: bool, **options: Any) -> int:
    """Empty this host: move its sessions to others.

    Cheap ones first, several at once, to whoever has most room. What has no time or no target is parked in the store.
    No session begins here until: cmdop-migrate undrain. Exit 10 when something stayed. Interrupted, it finishes what
    is under way; run again, it goes on.

    \b
    Examples:
      cmdop-migrate drain --to host-b,host-c --deadline 10m
      cmdop-migrate drain --dry-run
      cmdop-migrate drain --park
    """
    wanted = Wanted(**options)
    if dry_run:
        _show_schedule(app, flow.dry_run(app.this_host(keeping=False), wanted))
        return 0
    with stopping.on_signals() as stop, render.progress(app.json) as show:
        facts = flow.drain(app.this_host(), wanted, app.global_flags(), stop, _teller(app, show))
    error = _stayed(facts)
    if app.json:
        render.answer({**facts, **({"error": render.error_facts(error)} if error else {})})
        return error.exit if error else 0
    for one in facts["targets"]:
        if not one["ok"]:
            render.note(f"not used: {one['why']}")
    counts = ", ".join(f"{len(facts[word])} {word}" for word in ("moved", "parked", "failed", "left") if facts[word])
    late = "" if facts["deadline_kept"] else "; the deadline was not kept"
    render.line(f"{facts['host']}: {counts or 'nothing to move'}, in {facts['took_s']:.1f} s{late}")
    if error:
        raise error
    render.line("  no session begins here until: cmdop-migrate undrain")
    return 0


def _teller(app: App, show: Callable[[str], None]) -> Callable[[Said], None]:
    def tell(said: Said) -> None:
        if said.entry.state != "going" and not app.json:
            show("")
            render.line(_words(said.entry) + (f", {said.seconds:.1f} s" if said.seconds else ""))
        show("; ".join([*said.under_way, f"{said.waiting} wait"]))

    return tell


def _words(entry: Entry) -> str:
    done = {
        "moved": f"moved to {entry.to}",
        "back": "is back",
        "failed": "stays",
        "left": "stays",
        "going": "is not back",
    }
    facts = f", frozen {entry.facts['frozen_s']:.2f} s" if entry.facts.get("frozen_s") is not None else ""
    return f"{entry.name}: {done.get(entry.state, entry.state)}" + (f" ({entry.why})" if entry.why else "") + facts


def _stayed(facts: dict[str, Any]) -> Partial | None:
    stayed = [*facts["failed"], *facts["left"]]
    if not stayed:
        return None
    words = "; ".join(f"{one['name']} ({one['why']})" for one in stayed)
    noun = "session stays" if len(stayed) == 1 else "sessions stay"
    return Partial(
        f"{len(stayed)} {noun} on {facts['host']}: {words}",
        "Go on with: cmdop-migrate drain. Or: cmdop-migrate undrain",
    )


def _show_schedule(app: App, facts: dict[str, Any]) -> None:
    if app.json:
        render.answer(facts)
        return
    for one in facts["targets"]:
        if not one["ok"]:
            render.note(f"cannot be used: {one['why']}")
    if not facts["schedule"]:
        render.note("No sessions to move.")
        return
    render.table(
        ("NAME", "WHAT", "BEGINS", "ENDS", "MEMORY", "FILES", "SENDS", "WHY"),
        (
            (
                one["name"],
                f"to {one['to']}" if one["to"] else one["how"],
                f"{one['begin_s']:.0f}s",
                f"{one['end_s']:.0f}s",
                *(units.show_size(one["bytes"][part]) for part in ("memory", "files", "send")),
                one["why"],
            )
            for one in facts["schedule"]
        ),
    )


@click.command()
@click.option("--bring-back", is_flag=True, help="Bring home what the drain moved and parked.")
@click.option(
    "--parallel", type=click.IntRange(1, 4), default=2, show_default=True, metavar="N", help="So many at once."
)
@click.option(
    "--accept",
    multiple=True,
    metavar="CHECK",
    help="Bring it back though this check of the plan there blocks. Repeatable.",
)
@command
def undrain(app: App, bring_back: bool, parallel: int, accept: tuple[str, ...]) -> int:
    """Accept sessions again after a drain.

    With --bring-back each host that took one moves it back here: it must know this host by its name.

    \b
    Examples:
      cmdop-migrate undrain
      cmdop-migrate undrain --bring-back
      cmdop-migrate undrain --bring-back --accept kernel
    """

    def tell(entry: Entry) -> None:
        if not app.json:
            render.line(_words(entry if entry.state in ("back", "ended") else _not_back(entry)))

    with stopping.on_signals() as stop:
        wanted = back.Wanted(bring_back, parallel, accept)
        facts = back.undrain(app.this_host(), wanted, app.global_flags(), stop, tell)
    error = None
    if facts["failed"]:
        words = "; ".join(f"{one['name']} ({one.get('why', '')})" for one in facts["failed"])
        error = Partial(f"{len(facts['failed'])} are not back: {words}", "Again: cmdop-migrate undrain --bring-back")
    if app.json:
        render.answer({**facts, **({"error": render.error_facts(error)} if error else {})})
        return error.exit if error else 0
    back_now = f"; {len(facts['restored'])} back" if bring_back else ""
    ended = f", {len(facts['ended'])} ended meanwhile" if facts["ended"] else ""
    accepted = "sessions are accepted again" if facts["was_draining"] else "was not drained"
    render.line(f"{app.config.host}: {accepted}{back_now}{ended}")
    if not bring_back and facts["away"]:
        render.note(f"{len(facts['away'])} are away; bring them home with: cmdop-migrate undrain --bring-back")
    if error:
        raise error
    return 0


def _not_back(entry: Entry) -> Entry:
    return Entry(entry.session, entry.name, "going", entry.to, entry.why)
