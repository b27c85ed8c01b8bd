"""Print the output of a session."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from cmdop_migrate.cli import relay_options, render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.cli.relay_options import RelayOptions
from cmdop_migrate.host import talk
from cmdop_migrate.session.requests import Output

if TYPE_CHECKING:
    from cmdop_migrate.gateway.client import RelayAccess


@click.command()
@click.argument("session")
@click.option(
    "--from", "start", type=click.IntRange(min=0), metavar="SEQ", help="From this byte on [all that is kept]."
)
@click.option("--follow", is_flag=True, help="Keep printing new output.")
@relay_options.through_relay
@command
def output(app: App, session: str, start: int | None, follow: bool, relay: RelayOptions) -> None:
    """Print the output of a session, also after its end.

    Every byte has a permanent number: pass the `to` of one call as --from of the next.

    \b
    Examples:
      cmdop-migrate output work | tail -20
      cmdop-migrate output work --from 4096 --json
    """
    place = relay_options.elsewhere(app, relay, session)
    if follow:
        for piece in _follow(app, session, start, place):
            _print_piece(app, piece)
        return
    kept = _read(app, session, start, place)
    if app.json:
        render.answer(_as_json(kept))
        return
    if kept.lost:
        render.note(f"[{kept.lost} bytes before this are no longer kept]")
    render.raw(kept.data)


def _read(app: App, session: str, start: int | None, place: RelayAccess | None) -> Output:
    if place is None:
        return talk.output(app.this_host(), session, start)
    from cmdop_migrate.gateway import client

    return client.output(place, session, start)


def _follow(app: App, session: str, start: int | None, place: RelayAccess | None) -> Iterator[Output | dict[str, Any]]:
    if place is None:
        return talk.follow(app.this_host(), session, start)
    from cmdop_migrate.gateway import client

    return client.follow(place, session, start)


def _print_piece(app: App, piece: Output | dict[str, Any]) -> None:
    """Print output, or an event that came between two pieces of output."""
    if isinstance(piece, dict):
        if app.json:
            render.item(piece)
        elif piece.get("event") == "lost":
            render.note(f"[{piece['bytes']} bytes were lost: too much output at a time]")
        elif piece.get("event") == "undone":
            render.note(f"[{piece['output']} bytes before this were undone with the host that died]")
    elif app.json:
        render.item(_as_json(piece))
    else:
        render.raw(piece.data)


def _as_json(piece: Output) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "data": piece.data.decode("utf-8", "replace"),
        "from": piece.start,
        "to": piece.end,
        "lost": piece.lost,
    }
    try:
        piece.data.decode("utf-8")
    except UnicodeDecodeError:
        answer["data_base64"] = base64.b64encode(piece.data).decode()
    return answer
