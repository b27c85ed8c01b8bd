"""What every command shares: settings, the JSON switch, and the checks made before anything else."""

from __future__ import annotations

import functools
import getpass
import logging
import os
from collections.abc import Callable
from typing import Any

import click

from cmdop_migrate import clock, log
from cmdop_migrate import config as settings
from cmdop_migrate.config import Config
from cmdop_migrate.errors import CmdopError, NotRoot
from cmdop_migrate.host.host import Host
from cmdop_migrate.migration import prefetch
from cmdop_migrate.model import Record

RECENT = 60.0


def _needs_agent(record: Record) -> bool:
    """It lives here, or its lease is yet to be asked whether it is parked, or told that it has ended."""
    if record.exit is None:
        return record.phase in ("live", "handing")
    return record.exit.kind in ("parking_unknown", "kill_pending")


def _has_just_died(record: Record) -> bool:
    """Its holder noted nothing: it may be parked, and an agent asks its lease as soon as it starts."""
    exited = record.exit
    return exited is not None and exited.kind == "holder_died" and clock.walltime() - exited.at < RECENT


class App:
    """One invocation. The config is read on first use, so that --help works with a broken one."""

    def __init__(self) -> None:
        self.json = False
        self.verbosity = 0
        self.config_path: str | None = None
        self.flags: dict[str, str] = {}
        self._config: Config | None = None

    @property
    def config(self) -> Config:
        if self._config is None:
            self._config = settings.load(self.config_path, self.flags)
            log.set_up(self._config.log_file if os.geteuid() == 0 else None, self.verbosity)
        return self._config

    def global_flags(self) -> list[str]:
        """What a command of our own must be given to have these settings, besides the environment."""
        named = ["--config", os.path.abspath(self.config_path)] if self.config_path else []
        return [*named, *(word for key, value in self.flags.items() for word in (f"--{key.replace('_', '-')}", value))]

    def _keep_agent(self, this_host: Host) -> None:
        """Sessions whose agent died stand still before long, or nobody asks whether they are parked: whoever comes by
        first starts another."""
        kept = this_host.all()
        needed = any(map(_needs_agent, kept))
        if needed or any(map(_has_just_died, kept)):
            from cmdop_migrate.host import agent_process

            try:
                agent_process.ensure(self.config)
            except CmdopError as error:  # where nothing lives that is nobody's trouble
                log.get("cli").log(logging.WARNING if needed else logging.INFO, "no agent: %s", error.message)

    def this_host(self, keeping: bool = True) -> Host:
        """This host's sessions, stale ones put right first; with an agent, unless not `keeping`."""
        if os.geteuid() != 0:
            raise NotRoot("sessions need root", "Run it with sudo.")
        this_host = Host(self.config)
        this_host.prepare()
        this_host.sweep()
        prefetch.sweep(self.config.state_dir)
        if keeping:
            self._keep_agent(this_host)
        return this_host


pass_app = click.make_pass_decorator(App, ensure=True)


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hands the App over and adds --json, valid before and after the command's name."""

    @click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, for programs.")
    @pass_app
    @functools.wraps(function)
    def wrapped(app: App, /, as_json: bool, **arguments: Any) -> Any:
        app.json = app.json or as_json
        return function(app, **arguments)

    return wrapped


def actor_name(given: str | None) -> str:
    """Who acts, when not said: the person behind sudo, else the login name."""
    if given:
        return given
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
