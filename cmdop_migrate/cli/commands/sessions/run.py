"""Start a session."""

from __future__ import annotations

import sys
from typing import Any

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, actor_name, command
from cmdop_migrate.errors import Usage
from cmdop_migrate.host import run as host_run
from cmdop_migrate.session import attach as session_attach


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--name", metavar="NAME", help="Name of the session [generated].")
@click.option("--user", metavar="USER", help="Run as this user [you].")
@click.option("--cwd", metavar="DIR", help="Start in this directory [the current one].")
@click.option("--env", "env", multiple=True, metavar="K=V", help="Set a variable; K alone copies yours. Repeatable.")
@click.option(
    "--net",
    type=click.Choice(["private", "host"]),
    default="private",
    show_default=True,
    help="A private network behind NAT, or this host's network.",
)
@click.option(
    "--share", "shares", multiple=True, metavar="DIR", help="Share the host's DIR instead of a copy. Repeatable."
)
@click.option(
    "--hook",
    "hooks",
    multiple=True,
    metavar="EVENT=PATH",
    help="Run this executable of the host on EVENT. Repeatable.",
)
@click.option("--gate", metavar="PATH|URL", help="Ask this program or URL before each input line [the setting gate].")
@click.option("-d", "--detach", is_flag=True, help="Start it and return.")
@click.argument("argv", nargs=-1, required=True, metavar="-- CMD...")
@command
def run(app: App, name: str | None, detach: bool, argv: tuple[str, ...], **options: Any) -> None:
    """Start a session, and attach to it unless -d.

    The session sees this host's files; its changes to them stay private to it. It keeps running when you detach with
    Ctrl-\\ d, and when your terminal is closed.

    \b
    Examples:
      cmdop-migrate run --name work -- bash
      cmdop-migrate run -d --name train --env SEED=1 --share /data -- python3 train.py
    """
    if not detach and not app.json and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Usage("no terminal to attach to", "Start it in the background with: run -d")
    this_host = app.this_host()
    rows, cols = session_attach.size_of(sys.stdout.fileno())
    wish = host_run.RunOptions(command=argv, name=name, rows=rows, cols=cols, **options)
    record, hook_results = host_run.run(app.config, wish)
    hooks = [result.to_json() for result in hook_results]
    render.hooks(app.json, hooks)
    if app.json:
        render.answer(
            {"session": record.session, "name": record.name, "host": record.host}
            | {"token": record.token, "pid": record.pid, "hooks": hooks}
        )
    elif detach:
        render.line(record.name)
    else:
        from cmdop_migrate.cli.commands.sessions.attach import attach_here

        attach_here(this_host, record.session, actor_name(None), False, None)
