"""doctor, version."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict

import click

from cmdop_migrate import __version__
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import Blocked
from cmdop_migrate.host import doctor as flow
from cmdop_migrate.preflight.rules import doctor as rules_doctor
from cmdop_migrate.preflight.rules.doctor import Check


@click.command()
@click.option("--fix", is_flag=True, help="Install or fetch what is missing, where that can be done.")
@command
def doctor(app: App, fix: bool) -> int:
    """Check what this machine needs; --fix installs it.

    Each need is ok, degraded or missing, with its fix. Fails only for what sessions cannot do without.

    \b
    Examples:
      cmdop-migrate doctor
      cmdop-migrate doctor --fix
    """
    found = flow.fix(app.config, render.note) if fix else flow.diagnose(app.config)
    if app.config.relay is not None:
        from cmdop_migrate.gateway import check  # most hosts have no relay, and loading it takes a while

        found += check.check(app.config)
    usable = rules_doctor.usable(found)
    if app.json:
        render.answer({"ok": usable, "checks": [asdict(one) for one in found]})
    else:
        columns = shutil.get_terminal_size((100, 24)).columns
        taken = max(len(one.name) for one in found) + max(len(one.level) for one in found) + 4
        render.table(("CHECK", "LEVEL", "WHAT"), [row for one in found for row in _rows(one, max(30, columns - taken))])
        for one in found:
            if one.level != "ok":
                render.line("\n" + textwrap.fill(f"{one.name}: {one.fix}", columns, break_on_hyphens=False))
        render.line("\nThis machine is ready." if usable else "\nThis machine is not ready: see what is missing.")
    return 0 if usable else Blocked.exit


def _rows(check: Check, room: int) -> Iterator[tuple[str, str, str]]:
    """One line of the table, or several: words are not broken at the edge of the screen."""
    first, *rest = textwrap.wrap(check.message, room, break_on_hyphens=False) or [""]
    yield check.name, check.level, first
    yield from (("", "", line) for line in rest)


@click.command()
@click.option("--places", is_flag=True, help="Also ask the store and the lease store who they are.")
@command
def version(app: App, places: bool) -> None:
    """Show the version, and what another host must have in common with this one.

    Hosts that move sessions to each other need one protocol, store, lease store and key.

    \b
    Examples:
      cmdop-migrate version
      cmdop-migrate version --places --json
    """
    from cmdop_migrate.migration import compatibility  # people who ask for the version alone need not wait for it

    this_host = app.this_host(keeping=False) if os.geteuid() == 0 else None
    facts = compatibility.facts(app.config, this_host, places)
    if app.json:
        render.answer(facts)
        return
    render.line(f"cmdop-migrate {__version__}, protocol {facts['protocol']}, on {facts['host']}")
    for word in ("store", "lease"):
        shown = facts[word]
        render.line(f"  {word:<6} {shown['url']}" + (f"  ({shown['id']})" if shown["id"] else ""))
    render.line(f"  {'keys':<6} {', '.join(one[:16] for one in facts['keys']) or 'none yet'}")
