"""doctor."""

from __future__ import annotations

from dataclasses import asdict

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import Blocked
from cmdop_migrate.flows import doctor as flow
from cmdop_migrate.preflight import checks


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
    usable = checks.usable(found)
    if app.json:
        render.answer({"ok": usable, "checks": [asdict(one) for one in found]})
    else:
        render.table(("CHECK", "LEVEL", "WHAT"), ((one.name, one.level, one.message) for one in found))
        for one in found:
            if one.level != "ok":
                render.line(f"\n{one.name}: {one.fix}")
        render.line("\nThis machine can run sessions." if usable else "\nThis machine cannot run sessions yet.")
    return 0 if usable else Blocked.exit
