"""attach, send, output, wait, events."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cmdop_migrate import units
from cmdop_migrate.cli import relay_options, render
from cmdop_migrate.cli.app import App, actor_name, command
from cmdop_migrate.errors import SessionExited, Usage
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.session import attach as session_attach
from cmdop_migrate.session.holder_client import exited
from cmdop_migrate.session.requests import Output

if TYPE_CHECKING:
    from cmdop_migrate.gateway.client import RelayAccess

Relay = tuple[str | None, Path | None]


@click.command()
@click.argument("session")
@click.option("--read-only", is_flag=True, help="Watch; what you type goes nowhere.")
@click.option(
    "--from",
    "start",
    type=click.IntRange(min=0),
    metavar="SEQ",
    help="Go on at this byte of its output [all that is kept].",
)
@click.option("--actor", metavar="NAME", help="Who is typing [you; through a relay, whom the credential names].")
@relay_options.through_relay
@command
def attach(app: App, session: str, read_only: bool, start: int | None, actor: str | None, relay: Relay) -> None:
    """Join a session with this terminal; Ctrl-\\ d leaves it.

    The screen comes back as it was; the session goes on when you leave. Several may be attached at once.
    Ctrl-\\ twice types one.

    \b
    Examples:
      cmdop-migrate attach work
      cmdop-migrate attach work --read-only
      cmdop-migrate attach work --relay wss://relay.example:7443 --credential ~/relay.credential
    """
    if app.json:
        raise Usage("attach is for terminals", "Programs use: send, output, wait")
    where = relay_options.elsewhere(app, relay, session)
    if where is not None:
        _attach_afar(where, session, read_only, start)
        return
    attach_to(app.this_host(), session, actor_name(actor), read_only, start)


def _attach_afar(where: RelayAccess, session: str, read_only: bool, start: int | None) -> None:
    from cmdop_migrate.gateway import client

    found, outcome = client.attach(where, session, read_only, start, sys.stdin.fileno(), sys.stdout.fileno())
    if outcome.kind == "exited":
        render.note(f"[{found.name}: {outcome.detail.get('reason', 'ended')}]")
    else:
        render.note(f"[detached from {found.name} at byte {outcome.seq}]")


def attach_to(this_host: Host, session: str, actor: str, read_only: bool, start: int | None) -> None:
    record, channel = talk.open_channel(this_host, session)
    with channel:
        outcome = session_attach.attach(channel, actor, read_only, start, sys.stdin.fileno(), sys.stdout.fileno())
    if outcome.kind == "exited":
        render.note(f"[{record.name}: {outcome.detail.get('reason', 'ended')}]")
    elif outcome.kind == "lost":
        after = talk.after_loss(this_host, record)
        raise exited(record.name, after.exit, after.phase)
    else:
        render.note(
            f"[detached from {record.name} at byte {outcome.seq}; come back with: cmdop-migrate attach {record.name}]"
        )


@click.command()
@click.argument("session")
@click.argument("text")
@click.option("--enter", is_flag=True, help="Press Enter after it.")
@click.option("--actor", metavar="NAME", help="Who says it [you; through a relay, whom the credential names].")
@relay_options.through_relay
@command
def send(app: App, session: str, text: str, enter: bool, actor: str | None, relay: Relay) -> None:
    """Type one input into a session; it arrives whole.

    \b
    Examples:
      cmdop-migrate send work 'make test' --enter
      cmdop-migrate send work $'\\x03'                (Ctrl-C)
    """
    data = text.encode("utf-8", "surrogateescape") + (b"\r" if enter else b"")
    if not data:
        raise Usage("nothing to send", "Give some text, or --enter.")
    if len(data) > 128 << 10:
        raise Usage(f"too long for one input: {len(data)} bytes", "Send at most 128 KiB at once.")
    where = relay_options.elsewhere(app, relay, session)
    if where is not None:
        from cmdop_migrate.gateway import client

        result = client.send(where, session, data)
    else:
        result = talk.send(app.this_host(), session, data, actor_name(actor))
    if app.json:
        render.answer(result)


@click.command()
@click.argument("session")
@click.option(
    "--from", "start", type=click.IntRange(min=0), metavar="SEQ", help="From this byte on [all that is kept]."
)
@click.option("--follow", is_flag=True, help="Go on as it prints.")
@relay_options.through_relay
@command
def output(app: App, session: str, start: int | None, follow: bool, relay: Relay) -> None:
    """Print what a session printed, also after its end.

    Every byte has a number, for good: the next call may go on with --from where this one ended.

    \b
    Examples:
      cmdop-migrate output work | tail -20
      cmdop-migrate output work --from 4096 --json
    """
    got, pieces = _printed(app, session, start, follow, relay_options.elsewhere(app, relay, session))
    if got is not None:
        if app.json:
            render.answer(_as_json(got))
        else:
            if got.lost:
                render.note(f"[{got.lost} bytes before this are no longer kept]")
            render.raw(got.data)
        return
    for piece in pieces:
        if isinstance(piece, dict):
            if app.json:
                render.item(piece)
            elif piece.get("event") == "lost":
                render.note(f"[{piece['bytes']} bytes were too much to keep]")
            elif piece.get("event") == "undone":
                render.note(f"[{piece['output']} bytes before this were undone with the host that died]")
        elif app.json:
            render.item(_as_json(piece))
        else:
            render.raw(piece.data)


def _printed(
    app: App, session: str, start: int | None, follow: bool, where: RelayAccess | None
) -> tuple[Output | None, Iterator[Output | dict[str, Any]]]:
    """What there is, or what comes."""
    if where is not None:
        from cmdop_migrate.gateway import client

        if follow:
            return None, client.follow(where, session, start)
        return client.output(where, session, start), iter(())
    if follow:
        return None, talk.follow(app.this_host(), session, start)
    return talk.output(app.this_host(), session, start), iter(())


def _as_json(got: Output) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "data": got.data.decode("utf-8", "replace"),
        "from": got.start,
        "to": got.end,
        "lost": got.lost,
    }
    try:
        got.data.decode("utf-8")
    except UnicodeDecodeError:
        answer["data_base64"] = base64.b64encode(got.data).decode()
    return answer


@click.command()
@click.argument("session")
@click.option("--for", "pattern", metavar="REGEX", help="Until it has printed this.")
@click.option(
    "--from", "start", type=click.IntRange(min=0), metavar="SEQ", help="Look from this byte on [all that is kept]."
)
@click.option(
    "--timeout", type=units.duration, metavar="TIME", default="30s", show_default=True, help="Then give up: exit 11."
)
@relay_options.through_relay
@command
def wait(app: App, session: str, pattern: str | None, start: int | None, timeout: float, relay: Relay) -> int:
    """Wait until a session prints something, or ends. Exits 4 when it ends without having printed that.

    \b
    Examples:
      cmdop-migrate wait work --timeout 1h
      cmdop-migrate wait work --for 'listening on .*' --timeout 2m
    """
    where = relay_options.elsewhere(app, relay, session)
    if where is not None:
        from cmdop_migrate.gateway import client

        result = client.wait(where, session, pattern, timeout, start)
    else:
        result = talk.wait(app.this_host(), session, pattern, timeout, start)
    if app.json:
        render.answer(result)
    elif "matched" in result:
        render.line(result["matched"])
    else:
        render.line(result["reason"])
    return SessionExited.exit if pattern is not None and "matched" not in result else 0


@click.command()
@click.argument("session", required=False)
@click.option("--follow", is_flag=True, help="Go on as things happen.")
@command
def events(app: App, session: str | None, follow: bool) -> None:
    """Print the record of what happened here, as JSON lines.

    \b
    Examples:
      cmdop-migrate events
      cmdop-migrate events work --follow
    """
    this_host = app.this_host()
    wanted = this_host.find(session).session if session is not None else None
    kept = this_host.events
    for line in kept.follow(wanted, lambda: time.sleep(0.2)) if follow else kept.read(wanted):
        render.item(line)
