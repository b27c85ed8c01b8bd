"""Run the agent of this host."""

from __future__ import annotations

import contextlib
import json
import os

import click

from cmdop_migrate.agent import daemon
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import CmdopError


@click.command()
@click.option("--until-idle", is_flag=True, help="Exit when this host has no sessions.")
@click.option("--ready-fd", type=int, hidden=True)
@command
def agent(app: App, until_idle: bool, ready_fd: int | None) -> None:
    """Renew the leases of this host's sessions. `run` starts an agent when none is running.

    Without it, sessions are frozen when their lease expires, and resume when it is renewed.

    \b
    Examples:
      cmdop-migrate agent
      systemctl enable --now cmdop-migrate-agent
    """
    reported = ready_fd is None

    def report_ready(error: CmdopError | None) -> None:
        """Write to --ready-fd, once, that the agent serves or why it cannot."""
        nonlocal reported
        if ready_fd is None or reported:
            return
        reported = True
        facts = {"code": error.code, "message": error.message, "hint": error.hint} if error else None
        with contextlib.suppress(OSError):  # the process that started this one may be gone
            os.write(ready_fd, json.dumps(facts).encode() if facts else b"ready")
        os.close(ready_fd)

    try:
        daemon.serve(app.this_host(keeping=False), until_idle, report_ready)
    except CmdopError as error:
        report_ready(error)
        raise
