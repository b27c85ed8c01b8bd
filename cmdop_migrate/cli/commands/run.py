"""run, ls, show, kill."""

from __future__ import annotations

import shlex
import signal as signals
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cmdop_migrate import units
from cmdop_migrate.cli import relay_options, render
from cmdop_migrate.cli.app import App, actor_name, command
from cmdop_migrate.errors import Usage
from cmdop_migrate.host import drain_journal, listing
from cmdop_migrate.host import kill as host_kill
from cmdop_migrate.host import run as run_flow
from cmdop_migrate.session import attach

if TYPE_CHECKING:
    from cmdop_migrate.gateway.client import RelayAccess


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--name", metavar="NAME", help="What to call it [made up].")
@click.option("--user", metavar="USER", help="Run as this user [you].")
@click.option("--cwd", metavar="DIR", help="Start in this directory [this one].")
@click.option("--env", "env", multiple=True, metavar="K=V", help="Set a variable; K alone copies yours. Repeatable.")
@click.option(
    "--net",
    type=click.Choice(["private", "host"]),
    default="private",
    show_default=True,
    help="One of its own behind NAT, or this host's.",
)
@click.option("--share", "shares", multiple=True, metavar="DIR", help="The host's own DIR, not a copy. Repeatable.")
@click.option(
    "--hook",
    "hooks",
    multiple=True,
    metavar="EVENT=PATH",
    help="The host's executable to be told of EVENT. Repeatable.",
)
@click.option("--gate", metavar="PATH|URL", help="Asked before a line goes in [the setting gate].")
@click.option("-d", "--detach", is_flag=True, help="Start it and return.")
@click.argument("argv", nargs=-1, required=True, metavar="-- CMD...")
@command
def run(app: App, name: str | None, detach: bool, argv: tuple[str, ...], **options: Any) -> None:
    """Start a session, and attach to it unless -d.

    The session sees this host's files; what it changes stays its own. It goes on when you leave it, with
    Ctrl-\\ d, and when your terminal goes away.

    \b
    Examples:
      cmdop-migrate run --name work -- bash
      cmdop-migrate run -d --name train --env SEED=1 --share /data -- python3 train.py
    """
    if not detach and not app.json and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Usage("no terminal to attach to", "Start it in the background with: run -d")
    this_host = app.this_host()
    rows, cols = attach.size_of(sys.stdout.fileno())
    wish = run_flow.RunOptions(command=argv, name=name, rows=rows, cols=cols, **options)
    record, told = run_flow.run(app.config, wish)
    answers = [one.to_json() for one in told]
    render.hooks(app.json, answers)
    if app.json:
        render.answer(
            {"session": record.session, "name": record.name, "host": record.host}
            | {"token": record.token, "pid": record.pid, "hooks": answers}
        )
    elif detach:
        render.line(record.name)
    else:
        from cmdop_migrate.cli.commands.attach import attach_to

        attach_to(this_host, record.session, actor_name(None), False, None)


@click.command()
@click.option("--all-hosts", is_flag=True, help="Of every host that shares the lease store.")
@relay_options.through_relay
@command
def ls(app: App, all_hosts: bool, relay: tuple[str | None, Path | None]) -> None:
    """List the sessions of this host, or of all; or, through a relay, those you may use.

    Those that ended stay listed for a day (setting keep_exited), or until: cmdop-migrate kill.

    \b
    Examples:
      cmdop-migrate ls
      cmdop-migrate ls --json | jq -r '.sessions[] | select(.state == "running") | .name'
      cmdop-migrate ls --relay wss://relay.example:7443 --credential ~/relay.credential
    """
    where = relay_options.elsewhere(app, relay)
    if where is not None:
        _list_afar(app, where)
        return
    found = listing.list_everywhere(app.this_host()) if all_hosts else listing.list_here(app.this_host())
    drained = drain_journal.read_flag(app.config.state_dir)
    if app.json:
        render.answer(
            {"sessions": [asdict(row) for row in found], **({"draining": asdict(drained)} if drained else {})}
        )
        return
    if drained:
        render.note("This host is being drained; no session begins here until: cmdop-migrate undrain")
    if not found:
        render.note("No sessions. Start one with: cmdop-migrate run --name work -- bash")
        return
    render.table(
        ("NAME", "SESSION", *(["HOST"] if all_hosts else []), "STATE", "CLIENTS", "IDLE", "MEMORY", "COMMAND"),
        (
            (
                row.name,
                row.session[:12],
                *([row.host] if all_hosts else []),
                _state(row.state, row.note),
                "-" if row.clients is None else str(row.clients),
                units.show_duration(row.idle_s) if row.idle_s is not None else "-",
                units.show_size(row.rss) if row.rss else "-",
                shlex.join(row.command),
            )
            for row in found
        ),
    )


def _list_afar(app: App, where: RelayAccess) -> None:
    from cmdop_migrate.gateway import client

    found = client.list_all(where)
    if app.json:
        render.answer({"sessions": found})
    elif not found:
        render.note("No sessions for this credential.")
    else:
        rows = ((one["name"], one["session"][:12], one["host"], one["state"], one["clients"]) for one in found)
        shown = [tuple("-" if cell is None else str(cell) for cell in row) for row in rows]
        render.table(("NAME", "SESSION", "HOST", "STATE", "CLIENTS"), shown)


@click.command()
@click.argument("session")
@command
def show(app: App, session: str) -> None:
    """Show one session: its processes, sockets, open and changed files.

    SESSION is its name, its id, or the beginning of its id.

    \b
    Examples:
      cmdop-migrate show work
      cmdop-migrate show work --json | jq -r '.files[].path'
    """
    facts = listing.show(app.this_host(), session)
    if app.json:
        render.answer(facts)
        return
    render.line(f"{facts['name']}  {facts['session']}  {_state(facts['state'], facts['note'])}")
    render.line(f"  command   {shlex.join(facts['command'])}")
    render.line(f"  user      {facts['user']}   cwd {facts['cwd']}")
    render.line(f"  host      {facts['host']}   token {facts['token']}   clients {facts['clients']}")
    render.line(f"  network   {facts['net']}" + (f" {facts['address']}" if facts["address"] else ""))
    render.line(f"  output    bytes {facts['output']['start']} to {facts['output']['end']} are kept")
    for one in facts["hooks"]:
        render.line(f"  hook      {one['event']}: {one['path']}")
    if facts["gate"]:
        render.line(f"  gate      {facts['gate']}")
    if facts["turn"]:
        render.line(f"  turn      {facts['turn']}")
    render.line(f"  saved     {facts['checkpoint'] or 'no checkpoint'}")
    _section("processes", ("PID", "INSIDE", "USER", "STATE", "MEMORY", "COMMAND"), [
        (str(p["pid"]), str(p["inner_pid"]), p["user"], p["state"], units.show_size(p["rss"]), p["command"])
        for p in facts["tree"]
    ])  # fmt: skip
    _section("sockets", ("PID", "KIND", "LOCAL", "REMOTE", "STATE"), [
        (str(s["pid"]), s["kind"], s["local"] or "-", s["remote"] or "-", s["state"]) for s in facts["sockets"]
    ])  # fmt: skip
    _section("open for writing, or locked", ("PID", "FD", "ACCESS", "OFFSET", "LOCKS", "PATH"), [
        (str(f["pid"]), str(f["fd"]), f["access"], str(f["offset"]), ", ".join(f["locks"]) or "-", f["path"])
        for f in facts["open_files"]
    ])  # fmt: skip
    _section("changed files", ("CHANGE", "SIZE", "PATH"), [
        (f["change"], units.show_size(f["size"]), f["path"]) for f in facts["files"]
    ])  # fmt: skip


def _signal_name(text: str) -> str:
    return f"SIG{text.upper().removeprefix('SIG')}"


def _section(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    render.line(f"\n{title}: {len(rows)}")
    if rows:
        render.table(headings, rows)


@click.command()
@click.argument("session")
@click.option("--signal", "name", default="TERM", show_default=True, metavar="NAME", help="How to ask it.")
@click.option(
    "--grace",
    type=units.duration,
    metavar="TIME",
    default="5s",
    show_default=True,
    help="Wait so long, then kill it outright.",
)
@command
def kill(app: App, session: str, name: str, grace: float) -> None:
    """End a session; discard one that is parked; remove one that has ended.

    What it printed can be read until it is removed, by a second kill or after a day. A parked one is never restored
    again, by no host; its checkpoints stay until they are pruned.

    \b
    Examples:
      cmdop-migrate kill work
      cmdop-migrate kill work --signal KILL
    """
    try:
        number = signals.Signals(int(name)) if name.isdecimal() else signals.Signals[_signal_name(name)]
    except (KeyError, ValueError):
        raise Usage(f"no such signal: {name}", "For example TERM, INT, HUP or KILL.") from None
    result = host_kill.kill(app.this_host(), session, number, grace)
    if app.json:
        render.answer(_kill_json(result))
    elif result.outcome == "removed":
        render.line(f"{session}: had ended; removed")
    elif result.outcome == "discarded":
        render.line(f"{session}: was parked; discarded. Its checkpoints stay until: cmdop-migrate checkpoints prune")
    else:
        render.line(f"{session}: {result.reason or 'ended'}")


def _kill_json(result: host_kill.KillResult) -> dict[str, Any]:
    facts: dict[str, Any] = {"session": result.session, "exit": result.exit}
    if result.outcome == "removed":
        return {**facts, "removed": True}
    facts["reason"] = result.reason
    if result.outcome == "discarded":
        facts |= {"discarded": True, "checkpoint": result.checkpoint, "token": result.token}
    return facts


def _state(state: str, note: str) -> str:
    """`running`, `exited 0`, `exited (its holder died)`."""
    if not note or note.startswith(state):
        return note or state
    return f"{state} ({note})"
