"""End, discard or remove a session."""

from __future__ import annotations

import signal as signals
from typing import Any

import click

from cmdop_migrate import units
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import Usage
from cmdop_migrate.host import kill as host_kill


@click.command()
@click.argument("session")
@click.option("--signal", "name", default="TERM", show_default=True, metavar="NAME", help="Signal to send first.")
@click.option(
    "--grace",
    type=units.duration,
    metavar="TIME",
    default="5s",
    show_default=True,
    help="Wait this long, then send SIGKILL.",
)
@command
def kill(app: App, session: str, name: str, grace: float) -> None:
    """End a session; discard one that is parked; remove one that has ended.

    The output of an ended session can be read until it is removed, by a second kill or after a day. No host can restore
    a discarded session; its checkpoints stay until they are pruned.

    \b
    Examples:
      cmdop-migrate kill work
      cmdop-migrate kill work --signal KILL
    """
    number = _signal(name)
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


def _signal(name: str) -> signals.Signals:
    """Return the signal of this number or name, with or without SIG."""
    try:
        if name.isdecimal():
            return signals.Signals(int(name))
        return signals.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except (KeyError, ValueError):
        raise Usage(f"no such signal: {name}", "For example TERM, INT, HUP or KILL.") from None
