"""Check what this machine needs to run and move sessions."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import Blocked
from cmdop_migrate.host import doctor as host_doctor
from cmdop_migrate.preflight.rules import doctor as rules_doctor


@click.command()
@click.option("--fix", is_flag=True, help="Install or fetch what is missing, where possible.")
@command
def doctor(app: App, fix: bool) -> int:
    """Check what this machine needs; --fix installs it.

    Each need is ok, degraded or missing, with its fix. Fails only if something is missing that every session needs.

    \b
    Examples:
      cmdop-migrate doctor
      cmdop-migrate doctor --fix
    """
    checks = host_doctor.fix(app.config, render.note) if fix else host_doctor.diagnose(app.config)
    if app.config.relay is not None:
        from cmdop_migrate.gateway import (
            check as gateway_check,
        )  # most hosts have no relay, and it takes a while to load

        checks += gateway_check.check(app.config)
    usable = rules_doctor.usable(checks)
    if app.json:
        render.answer({"ok": usable, "checks": [asdict(check) for check in checks]})
    else:
        columns = shutil.get_terminal_size((100, 24)).columns
        render.findings([(check.name, check.level, check.message) for check in checks], columns)
        for check in checks:
            if check.level != "ok":
                render.line("\n" + textwrap.fill(f"{check.name}: {check.fix}", columns, break_on_hyphens=False))
        render.line("\nThis machine is ready." if usable else "\nThis machine is not ready: see what is missing.")
    return 0 if usable else Blocked.exit
