"""Show one session in detail."""

from __future__ import annotations

import shlex

import click

from cmdop_migrate import units
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.cli.commands.sessions.ls import state_words
from cmdop_migrate.host import listing


@click.command()
@click.argument("session")
@command
def show(app: App, session: str) -> None:
    """Show one session: its processes, sockets, open and changed files.

    SESSION is its name, its id, or a unique prefix of the id.

    \b
    Examples:
      cmdop-migrate show work
      cmdop-migrate show work --json | jq -r '.files[].path'
    """
    facts = listing.show(app.this_host(), session)
    if app.json:
        render.answer(facts)
        return
    render.line(f"{facts['name']}  {facts['session']}  {state_words(facts['state'], facts['note'])}")
    render.line(f"  command   {shlex.join(facts['command'])}")
    render.line(f"  user      {facts['user']}   cwd {facts['cwd']}")
    render.line(f"  host      {facts['host']}   token {facts['token']}   clients {facts['clients']}")
    render.line(f"  network   {facts['net']}" + (f" {facts['address']}" if facts["address"] else ""))
    render.line(f"  output    bytes {facts['output']['start']} to {facts['output']['end']} are kept")
    for hook in facts["hooks"]:
        render.line(f"  hook      {hook['event']}: {hook['path']}")
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


def _section(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    render.line(f"\n{title}: {len(rows)}")
    if rows:
        render.table(headings, rows)
