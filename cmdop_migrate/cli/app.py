"""Provide what every command shares: settings, the JSON switch, and this host's state prepared for use."""

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

RECENTLY_DIED = 60.0  # seconds


def _needs_agent(record: Record) -> bool:
    """Return True if the session lives here, or if its lease must still be read or released after its end."""
    if record.exit is None:
        return record.phase in ("live", "handing")
    return record.exit.kind in ("parking_unknown", "kill_pending")


def _has_just_died(record: Record) -> bool:
    """Return True if the holder died recently without noting why. The session may be parked: an agent reads its lease
    when it starts."""
    exited = record.exit
    return exited is not None and exited.kind == "holder_died" and clock.walltime() - exited.at < RECENTLY_DIED


class App:
    """Hold the state of one command. The config is read on first use, so that --help works with a broken one."""

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
        """Return the flags that give a command started by this one the same settings, besides the environment."""
        named = ["--config", os.path.abspath(self.config_path)] if self.config_path else []
        return [*named, *(word for key, value in self.flags.items() for word in (f"--{key.replace('_', '-')}", value))]

    def _ensure_agent(self, this_host: Host) -> None:
        """Start an agent if sessions of this host need one and none is running. Without it they are frozen when their
        lease expires, and those that ended unnoticed are not looked up in the lease store."""
        records = this_host.all()
        needed = any(map(_needs_agent, records))
        if needed or any(map(_has_just_died, records)):
            from cmdop_migrate.host import agent_process

            try:
                agent_process.ensure(self.config)
            except CmdopError as error:  # harmless where no session lives
                log.get("cli").log(logging.WARNING if needed else logging.INFO, "no agent: %s", error.message)

    def this_host(self, keeping: bool = True) -> Host:
        """Return this host's state after a sweep of stale sessions and prefetched packs. With `keeping`, start an agent
        where sessions need one. Raise NotRoot."""
        if os.geteuid() != 0:
            raise NotRoot("sessions need root", "Run it with sudo.")
        this_host = Host(self.config)
        this_host.prepare()
        this_host.sweep()
        prefetch.sweep(self.config.state_dir)
        if keeping:
            self._ensure_agent(this_host)
        return this_host


pass_app = click.make_pass_decorator(App, ensure=True)


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the App to a command, and add --json, valid before and after the command's name."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, for programs.")
    @pass_app
    @functools.wraps(function)
    def wrapped(app: App, /, as_json: bool, **arguments: Any) -> Any:
        app.json = app.json or as_json
        return function(app, **arguments)

    return wrapped


def actor_name(given: str | None) -> str:
    """Return the actor given by --actor, else the user behind sudo, else the login name."""
    if given:
        return given
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
