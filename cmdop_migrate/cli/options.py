"""Define options that several commands share."""

from __future__ import annotations

import click

from cmdop_migrate import units

CARRY = click.option(
    "--carry",
    type=click.Choice(["none", "mapped", "opened"]),
    default="mapped",
    show_default=True,
    help="Host files that travel along.",
)
WAIT_QUIET = click.option(
    "--wait-quiet",
    type=units.duration,
    default="0s",
    metavar="TIME",
    help="Wait so long for temporary blockers to pass: a sandboxed command, a debugger, an unaccepted connection.",
)
