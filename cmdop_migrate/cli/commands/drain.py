"""drain, undrain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from cmdop_migrate import units
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.drain import drain as flow
from cmdop_migrate.drain import undrain as back
from cmdop_migrate.drain.capacity import UnfitHost
from cmdop_migrate.drain.runner import DrainProgress
from cmdop_migrate.drain.schedule import DrainTarget, Planned
from cmdop_migrate.errors import Partial, Usage
from cmdop_migrate.host.drain_journal import DrainState, Entry
from cmdop_migrate.util import signals as stopping

STATES: tuple[DrainState, ...] = ("moved", "parked", "failed", "left", "ended")


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
    request = flow.DrainOptions(**options)
    if dry_run:
        _show_schedule(app, flow.dry_run(app.this_host(keeping=False), request))
        return 0
    with stopping.on_signals() as stop, render.progress(app.json) as show:
        result = flow.drain(app.this_host(), request, app.global_flags(), stop, _teller(app, show))
    error = _stayed(result)
    if app.json:
        render.answer({**_drain_json(result), **({"error": render.error_facts(error)} if error else {})})
        return error.exit if error else 0
    for host in result.unfit:
        render.note(f"not used: {host.why}")
    counts = ", ".join(f"{len(result.of(state))} {state}" for state in STATES[:-1] if result.of(state))
    late = "" if result.deadline_kept else "; the deadline was not kept"
    render.line(f"{result.host}: {counts or 'nothing to move'}, in {result.took_s:.1f} s{late}")
    if error:
        raise error
    render.line("  no session begins here until: cmdop-migrate undrain")
    return 0


def _teller(app: App, show: Callable[[str], None]) -> Callable[[DrainProgress], None]:
    def tell(progress: DrainProgress) -> None:
        if progress.entry.state != "going" and not app.json:
            show("")
            render.line(_words(progress.entry) + (f", {progress.seconds:.1f} s" if progress.seconds else ""))
        show("; ".join([*progress.under_way, f"{progress.waiting} wait"]))

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


def _drain_json(result: flow.DrainResult) -> dict[str, Any]:
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


def _stayed(result: flow.DrainResult) -> Partial | None:
    stayed = result.of("failed") + result.of("left")
    if not stayed:
        return None
    words = "; ".join(f"{entry.name} ({entry.why})" for entry in stayed)
    noun = "session stays" if len(stayed) == 1 else "sessions stay"
    return Partial(
        f"{len(stayed)} {noun} on {result.host}: {words}",
        "Go on with: cmdop-migrate drain. Or: cmdop-migrate undrain",
    )


def _schedule_json(plan: flow.DrainPlan) -> dict[str, Any]:
    lists = {
        word: [_planned_json(one) for one in plan.planned if one.how == how]
        for word, how in (("moved", "move"), ("parked", "park"), ("left", "leave"))
    }
    rows = [_planned_json(one) for one in plan.planned]
    targets = _hosts_json(plan.targets, plan.unfit)
    return {"dry_run": True, "schedule": rows, **lists, "failed": [], "targets": targets}


def _planned_json(one: Planned) -> dict[str, Any]:
    known = {"session": one.load.session, "name": one.load.name, "how": one.how, "to": one.target, "why": one.why}
    times = {"begin_s": round(one.begin_s, 1), "end_s": round(one.end_s, 1)}
    return {**known, **times, "bytes": {"memory": one.load.memory, "files": one.load.files, "send": one.load.send}}


def _show_schedule(app: App, plan: flow.DrainPlan) -> None:
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
                one.load.name,
                f"to {one.target}" if one.target else one.how,
                f"{one.begin_s:.0f}s",
                f"{one.end_s:.0f}s",
                *(units.show_size(size) for size in (one.load.memory, one.load.files, one.load.send)),
                one.why,
            )
            for one in plan.planned
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
        options = back.UndrainOptions(bring_back, parallel, accept)
        result = back.undrain(app.this_host(), options, app.global_flags(), stop, tell)
    failed = result.of(*back.AWAY)
    error = None
    if failed:
        words = "; ".join(f"{entry.name} ({entry.why})" for entry in failed)
        error = Partial(f"{len(failed)} are not back: {words}", "Again: cmdop-migrate undrain --bring-back")
    if app.json:
        render.answer({**_undrain_json(result), **({"error": render.error_facts(error)} if error else {})})
        return error.exit if error else 0
    back_now = f"; {len(result.of('back'))} back" if bring_back else ""
    ended = f", {len(result.of('ended'))} ended meanwhile" if result.of("ended") else ""
    accepted = "sessions are accepted again" if result.was_draining else "was not drained"
    render.line(f"{app.config.host}: {accepted}{back_now}{ended}")
    if not bring_back and result.away:
        render.note(f"{len(result.away)} are away; bring them home with: cmdop-migrate undrain --bring-back")
    if error:
        raise error
    return 0


def _undrain_json(result: back.UndrainResult) -> dict[str, Any]:
    lists = {"restored": result.of("back"), "failed": result.of(*back.AWAY), "ended": result.of("ended")}
    return {
        "was_draining": result.was_draining,
        **{word: [entry.to_json() for entry in entries] for word, entries in lists.items()},
        "away": [entry.to_json() for entry in result.away],
    }


def _not_back(entry: Entry) -> Entry:
    return Entry(entry.session, entry.name, "going", entry.to, entry.why)
