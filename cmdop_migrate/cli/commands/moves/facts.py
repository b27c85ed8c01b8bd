"""Answer another host's `plan` with the facts of this host."""

from __future__ import annotations

import json
from typing import BinaryIO

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import ImageRefused, Usage
from cmdop_migrate.migration import gather_facts
from cmdop_migrate.preflight.facts.host import HostQuery

MAX_REQUEST = 64 << 20


@click.command(hidden=True)
@click.option("--for", "asked", type=click.File("rb"), default="-", help="The request, as JSON; `-` is stdin.")
@command
def facts(app: App, asked: BinaryIO) -> None:
    """Print this host's facts for a move, as another host's `plan` requests them over SSH.

    \b
    Examples:
      cmdop-migrate facts --json --for ask.json
    """
    data = asked.read(MAX_REQUEST)
    try:
        ask = HostQuery.from_json(json.loads(data))
        answer = gather_facts.gather_host(app.this_host(keeping=False), ask)
    except (ValueError, ImageRefused) as error:
        raise Usage(f"not a request for host facts: {error}", "It is sent by: cmdop-migrate plan --to HOST") from error
    render.answer(answer.to_json())
