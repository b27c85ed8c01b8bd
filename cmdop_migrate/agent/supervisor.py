"""Supervise child processes of the agent: restart them when they exit, end them with the agent.

They cannot keep the agent from renewing leases: all they share with it is a pipe, their standard input, whose end tells
them that the agent is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import cmdop_migrate
from cmdop_migrate import clock, log
from cmdop_migrate import config as settings
from cmdop_migrate.config import Config
from cmdop_migrate.relay.backoff import Backoff

RECHECK_EVERY = 1.0  # seconds between two checks whether a process may run
_log = log.get("agent")


def children(config: Config) -> list[SupervisedProcess]:
    """Return the child processes enabled in the configuration."""
    enabled = []
    if config.relay is not None:
        enabled.append(link(config))
    if config.ready:
        enabled.append(ready(config))
    return enabled


def link(config: Config) -> SupervisedProcess:
    """Return the process that links this host to a relay, once there is a credential for it."""
    end_timeout = 5.0  # seconds: it may have messages left to send (gateway.link_main.LINGER)
    module = ("cmdop_migrate", "link")
    return SupervisedProcess(
        config, "link", module, Backoff(0.2, 30.0), 10.0, end_timeout, config.relay_credential.exists
    )


def ready(config: Config) -> SupervisedProcess:
    """Return the fork server (cli/forkserver/server.py). Nothing depends on it: without it, a command does its work
    itself."""
    end_timeout = 0.2  # seconds: it only removes its socket; its forks keep running, they belong to their clients
    return SupervisedProcess(
        config, "ready", ("cmdop_migrate.cli.forkserver.server",), Backoff(2.0, 60.0), 60.0, end_timeout
    )


class SupervisedProcess:
    """Supervise one child process, in a thread."""

    def __init__(
        self,
        config: Config,
        name: str,
        module: Sequence[str],
        backoff: Backoff,
        stable_after: float,
        end_timeout: float,
        may_run: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run `module`, its name and arguments, with `python -m`. A process that ran for `stable_after` seconds resets
        the back-off."""
        self._config, self._name, self._module, self._backoff = config, name, module, backoff
        self._stable_after, self._end_timeout, self._may_run = stable_after, end_timeout, may_run
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(2 * self._end_timeout + 1.0)

    def _keep(self) -> None:
        while not self._stopped.is_set():
            if not self._may_run():
                self._stopped.wait(RECHECK_EVERY)
                continue
            began = clock.boottime()
            try:
                status = self._run()
            except OSError as error:
                status = error.errno or 1
            if self._stopped.is_set():
                return
            if clock.boottime() - began > self._stable_after:
                self._backoff.worked()
            _log.warning("the process %r exited with status %d; restarting it", self._name, status)
            self._stopped.wait(self._backoff.failed())

    def _run(self) -> int:
        """Run the process once, until it exits or the agent stops. Return its exit status."""
        with self._config.log_file.with_name(f"{self._name}.log").open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", *self._module],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                cwd="/",
                env={**os.environ, **settings.to_environment(self._config), "PYTHONPATH": _package()},
            )
        assert process.stdin is not None
        try:
            while process.poll() is None and not self._stopped.wait(0.1):
                pass
        finally:
            process.stdin.close()
            try:
                process.wait(self._end_timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return process.returncode


def _package() -> str:
    return str(Path(cmdop_migrate.__file__).parent.parent)
