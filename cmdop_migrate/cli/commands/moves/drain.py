"""Empty this host: move its sessions to other hosts, or park them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from cmdop_migrate import units
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.drain import drain as drain_engine
from cmdop_migrate.drain.drain_options import Said, Wanted
from cmdop_migrate.errors import Partial, Usage
from cmdop_migrate.host.drain_journal import Entry
from cmdop_migrate.util import signals as stopping


def _hosts(_ctx: click.Context, _option: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name for given in value for part in given.split(",") if (name := part.strip()))
    if value and not names:  # an unset shell variable does not mean: all hosts
        raise Usage("--to names no host", "Name some, or leave --to out: then all known hosts are used.")
    return names


@click.command()
@click.option(
    "--to", "hosts", metavar="HOST[,HOST]", multiple=True, callback=_hosts, help="Target hosts [all known hosts]."
)
@click.option("--deadline", type=units.duration, metavar="TIME", help="Finish within this time [no limit].")
@click.option("--park", is_flag=True, help="Park all sessions in the store instead of moving them.")
@click.option("--dry-run", is_flag=True, help="Only show the schedule.")
@click.option(
    "--parallel", type=int, default=2, show_default=True, metavar="N", help="Sessions at the same time, at most 4."
)
@click.option("--bandwidth", type=units.size, metavar="SIZE", help="Bytes per second to the store, in total.")
@click.option(
    "--memory", type=units.size, metavar="SIZE", help="Total memory of the sessions in progress [half of what is free]."
)
@command
def drain(app: App, dry_run: bool, **options: Any) -> int:
    """Empty this host: move its sessions to others.

    Cheap sessions first, several at the same time, each to the host with most room. A session without time or target is
    parked in the store. This host starts no session until: cmdop-migrate undrain. Exit 10 if a session stayed. An
    interrupted drain finishes what is in progress; run it again to continue.

    \b
    Examples:
      cmdop-migrate drain --to host-b,host-c --deadline 10m
      cmdop-migrate drain --dry-run
      cmdop-migrate drain --park
    """
    wanted = Wanted(**options)
    if dry_run:
        _show_schedule(app, drain_engine.dry_run(app.this_host(keeping=False), wanted))
        return 0
    with stopping.on_signals() as stop, render.progress(app.json) as show:
        facts = drain_engine.drain(app.this_host(), wanted, app.global_flags(), stop, _reporter(app, show))
    error = _stayed(facts)
    if app.json:
        render.answer({**facts, **render.error_field(error)})
        return error.exit if error else 0
    for target in facts["targets"]:
        if not target["ok"]:
            render.note(f"not used: {target['why']}")
    counts = ", ".join(f"{len(facts[word])} {word}" for word in ("moved", "parked", "failed", "left") if facts[word])
    late = "" if facts["deadline_kept"] else "; the deadline was not kept"
    render.line(f"{facts['host']}: {counts or 'nothing to move'}, in {facts['took_s']:.1f} s{late}")
    if error:
        raise error
    render.line("  it starts no session until: cmdop-migrate undrain")
    return 0


def _reporter(app: App, show: Callable[[str], None]) -> Callable[[Said], None]:
    def report(said: Said) -> None:
        if said.entry.state != "going" and not app.json:
            show("")
            render.line(entry_words(said.entry) + (f", {said.seconds:.1f} s" if said.seconds else ""))
        show("; ".join([*said.under_way, f"{said.waiting} wait"]))

    return report


def entry_words(entry: Entry) -> str:
    """Return the result of one session of a drain or undrain, for people."""
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
    words = "; ".join(f"{session['name']} ({session['why']})" for session in stayed)
    noun = "session stays" if len(stayed) == 1 else "sessions stay"
    return Partial(
        f"{len(stayed)} {noun} on {facts['host']}: {words}",
        "Continue with: cmdop-migrate drain. Or: cmdop-migrate undrain",
    )


def _show_schedule(app: App, facts: dict[str, Any]) -> None:
    if app.json:
        render.answer(facts)
        return
    for target in facts["targets"]:
        if not target["ok"]:
            render.note(f"cannot be used: {target['why']}")
    if not facts["schedule"]:
        render.note("No sessions to move.")
        return
    render.table(
        ("NAME", "WHAT", "BEGINS", "ENDS", "MEMORY", "FILES", "SENDS", "WHY"),
        (
            (
                session["name"],
                f"to {session['to']}" if session["to"] else session["how"],
                f"{session['begin_s']:.0f}s",
                f"{session['end_s']:.0f}s",
                *(units.show_size(session["bytes"][part]) for part in ("memory", "files", "send")),
                session["why"],
            )
            for session in facts["schedule"]
        ),
    )
