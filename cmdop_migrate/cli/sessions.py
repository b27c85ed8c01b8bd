"""run, ls, show, kill."""

from __future__ import annotations

import shlex
import signal as signals
import sys
from typing import Any

import click

from cmdop_migrate import units
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, actor_name, command
from cmdop_migrate.errors import Usage
from cmdop_migrate.flows import run as run_flow
from cmdop_migrate.flows import talk
from cmdop_migrate.session import terminal


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--name", metavar="NAME", help="What to call it [made up].")
@click.option("--user", metavar="USER", help="Run as this user [you].")
@click.option("--cwd", metavar="DIR", help="Start in this directory [this one].")
@click.option("--env", "env", multiple=True, metavar="K=V", help="Set a variable; K alone copies yours. Repeatable.")
@click.option("--net", type=click.Choice(["private", "host"]), default="private", show_default=True)
@click.option("--share", "shares", multiple=True, metavar="DIR", help="The host's own DIR, not a copy. Repeatable.")
@click.option("-d", "--detach", is_flag=True, help="Start it and return.")
@click.argument("argv", nargs=-1, required=True, metavar="-- CMD...")
@command
def run(app: App, name: str | None, detach: bool, argv: tuple[str, ...], **options: Any) -> None:
    """Start a session; attaches unless -d.

    \b
    cmdop-migrate run --name work -- bash
    cmdop-migrate run -d --name train --env SEED=1 --share /data -- python3 train.py

    The session sees this host's files; what it changes stays its own. Detach with Ctrl-\\ d.
    """
    if not detach and not app.json and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Usage("no terminal to attach to", "Start it in the background with: run -d")
    records = app.records()
    rows, cols = terminal.size_of(sys.stdout.fileno())
    wish = run_flow.Wish(command=argv, name=name, rows=rows, cols=cols, **options)
    record = run_flow.run(app.config, wish)
    if app.json:
        render.answer(
            {"session": record.session, "name": record.name, "host": record.host}
            | {"token": record.token, "pid": record.pid}
        )
    elif detach:
        render.line(record.name)
    else:
        from cmdop_migrate.cli.talk import attach_to

        attach_to(records, record.session, actor_name(None), False, None)


@click.command()
@click.option("--all-hosts", is_flag=True, help="Sessions everywhere, not only here.")
@command
def ls(app: App, all_hosts: bool) -> None:
    """Sessions here, or everywhere.

    \b
    cmdop-migrate ls
    cmdop-migrate ls --json | jq -r '.sessions[] | select(.state == "running") | .name'
    """
    if all_hosts:
        raise Usage("--all-hosts needs a shared lease store, which this version does not have yet", "Use: ls")
    found = talk.list_all(app.records())
    if app.json:
        render.answer({"sessions": found})
        return
    if not found:
        render.note("No sessions. Start one with: cmdop-migrate run --name work -- bash")
        return
    render.table(
        ("NAME", "SESSION", "STATE", "CLIENTS", "IDLE", "MEMORY", "COMMAND"),
        (
            (
                one["name"],
                one["session"][:12],
                one["state"] + (f" ({one['note']})" if one["note"] else ""),
                str(one["clients"]),
                units.show_duration(one["idle_s"]) if one["idle_s"] is not None else "-",
                units.show_size(one["rss"]) if one["rss"] else "-",
                shlex.join(one["command"]),
            )
            for one in found
        ),
    )


@click.command()
@click.argument("session")
@command
def show(app: App, session: str) -> None:
    """One session: its processes, sockets, changed files.

    \b
    cmdop-migrate show work
    """
    facts = talk.show(app.records(), session)
    if app.json:
        render.answer(facts)
        return
    state = facts["state"] + (f" ({facts['note']})" if facts["note"] else "")
    render.line(f"{facts['name']}  {facts['session']}  {state}")
    render.line(f"  command   {shlex.join(facts['command'])}")
    render.line(f"  user      {facts['user']}   cwd {facts['cwd']}")
    render.line(f"  host      {facts['host']}   token {facts['token']}   clients {facts['clients']}")
    render.line(f"  network   {facts['net']}" + (f" {facts['address']}" if facts["address"] else ""))
    render.line(f"  output    bytes {facts['output']['start']} to {facts['output']['end']} are kept")
    render.line(f"  saved     {facts['checkpoint'] or 'no checkpoint'}")
    _section("processes", ("PID", "INSIDE", "USER", "STATE", "MEMORY", "COMMAND"), [
        (str(p["pid"]), str(p["inner_pid"]), p["user"], p["state"], units.show_size(p["rss"]), p["command"])
        for p in facts["tree"]
    ])  # fmt: skip
    _section("sockets", ("PID", "KIND", "LOCAL", "REMOTE", "STATE"), [
        (str(s["pid"]), s["kind"], s["local"] or "-", s["remote"] or "-", s["state"]) for s in facts["sockets"]
    ])  # fmt: skip
    _section("files", ("CHANGE", "SIZE", "PATH"), [
        (f["change"], units.show_size(f["size"]), f["path"]) for f in facts["files"]
    ])  # fmt: skip


def _signal_name(text: str) -> str:
    return f"SIG{text.upper().removeprefix('SIG')}"


def _section(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    render.line(f"\n{len(rows)} {title}")
    if rows:
        render.table(headings, rows)


@click.command()
@click.argument("session")
@click.option("--signal", "name", default="TERM", show_default=True, help="What to ask with.")
@click.option(
    "--grace", type=units.duration, metavar="TIME", default="5s", show_default=True, help="Then kill it outright."
)
@command
def kill(app: App, session: str, name: str, grace: float) -> None:
    """End a session; remove one that has ended.

    \b
    cmdop-migrate kill work
    cmdop-migrate kill work --signal KILL
    """
    try:
        number = signals.Signals(int(name)) if name.isdecimal() else signals.Signals[_signal_name(name)]
    except (KeyError, ValueError):
        raise Usage(f"no such signal: {name}", "For example TERM, INT, HUP or KILL.") from None
    result = talk.kill(app.records(), session, number, grace)
    if app.json:
        render.answer(result)
    elif result.get("removed"):
        render.line(f"{session}: had ended; removed")
    else:
        render.line(f"{session}: {result.get('reason') or 'ended'}")
