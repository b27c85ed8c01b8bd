"""Empty this host: move its sessions to other hosts, or park them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from cmdop_migrate import units
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.drain import drain as drain_engine
from cmdop_migrate.drain.capacity import UnfitHost
from cmdop_migrate.drain.runner import DrainProgress
from cmdop_migrate.drain.schedule import DrainTarget, Planned
from cmdop_migrate.errors import Partial, Usage
from cmdop_migrate.host.drain_journal import DrainState, Entry
from cmdop_migrate.util import signals as stopping

STATES: tuple[DrainState, ...] = ("moved", "parked", "failed", "left", "ended")


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
    request = drain_engine.DrainOptions(**options)
    if dry_run:
        _show_schedule(app, drain_engine.dry_run(app.this_host(keeping=False), request))
        return 0
    with stopping.on_signals() as stop, render.progress(app.json) as show:
        result = drain_engine.drain(app.this_host(), request, app.global_flags(), stop, _reporter(app, show))
    error = _stayed(result)
    if app.json:
        render.answer({**_drain_json(result), **render.error_field(error)})
        return error.exit if error else 0
    for host in result.unfit:
        render.note(f"not used: {host.why}")
    counts = ", ".join(f"{len(result.of(state))} {state}" for state in STATES[:-1] if result.of(state))
    late = "" if result.deadline_kept else "; the deadline was not kept"
    render.line(f"{result.host}: {counts or 'nothing to move'}, in {result.took_s:.1f} s{late}")
    if error:
        raise error
    render.line("  it starts no session until: cmdop-migrate undrain")
    return 0


def _reporter(app: App, show: Callable[[str], None]) -> Callable[[DrainProgress], None]:
    def report(progress: DrainProgress) -> None:
        if progress.entry.state != "going" and not app.json:
            show("")
            render.line(entry_words(progress.entry) + (f", {progress.seconds:.1f} s" if progress.seconds else ""))
        show("; ".join([*progress.under_way, f"{progress.waiting} wait"]))

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


def _drain_json(result: drain_engine.DrainResult) -> dict[str, Any]:
    return {
        "drain": result.drain,
        "host": result.host,
        **{state: [entry.to_json() for entry in result.of(state)] for state in STATES},
        "targets": _hosts_json(result.targets, result.unfit),
        "deadline_s": result.deadline_s,
        "deadline_kept": result.deadline_kept,
        "took_s": result.took_s,
        "interrupted": result.interrupted,
    }


def _hosts_json(targets: Sequence[DrainTarget], unfit: Sequence[UnfitHost]) -> list[dict[str, Any]]:
    fit = [{"name": host.name, "ok": True, "memory": host.memory, "disk": host.disk} for host in targets]
    return [*fit, *({"name": host.name, "ok": False, "why": host.why} for host in unfit)]


def _stayed(result: drain_engine.DrainResult) -> Partial | None:
    stayed = result.of("failed") + result.of("left")
    if not stayed:
        return None
    words = "; ".join(f"{entry.name} ({entry.why})" for entry in stayed)
    noun = "session stays" if len(stayed) == 1 else "sessions stay"
    return Partial(
        f"{len(stayed)} {noun} on {result.host}: {words}",
        "Continue with: cmdop-migrate drain. Or: cmdop-migrate undrain",
    )


def _schedule_json(plan: drain_engine.DrainPlan) -> dict[str, Any]:
    lists = {
        word: [_planned_json(planned) for planned in plan.planned if planned.how == how]
        for word, how in (("moved", "move"), ("parked", "park"), ("left", "leave"))
    }
    rows = [_planned_json(planned) for planned in plan.planned]
    targets = _hosts_json(plan.targets, plan.unfit)
    return {"dry_run": True, "schedule": rows, **lists, "failed": [], "targets": targets}


def _planned_json(planned: Planned) -> dict[str, Any]:
    load = planned.load
    known = {"session": load.session, "name": load.name, "how": planned.how, "to": planned.target, "why": planned.why}
    times = {"begin_s": round(planned.begin_s, 1), "end_s": round(planned.end_s, 1)}
    return {**known, **times, "bytes": {"memory": load.memory, "files": load.files, "send": load.send}}


def _show_schedule(app: App, plan: drain_engine.DrainPlan) -> None:
    if app.json:
        render.answer(_schedule_json(plan))
        return
    for host in plan.unfit:
        render.note(f"cannot be used: {host.why}")
    if not plan.planned:
        render.note("No sessions to move.")
        return
    render.table(
        ("NAME", "WHAT", "BEGINS", "ENDS", "MEMORY", "FILES", "SENDS", "WHY"),
        (
            (
                planned.load.name,
                f"to {planned.target}" if planned.target else planned.how,
                f"{planned.begin_s:.0f}s",
                f"{planned.end_s:.0f}s",
                *(units.show_size(size) for size in (planned.load.memory, planned.load.files, planned.load.send)),
                planned.why,
            )
            for planned in plan.planned
        ),
    )
