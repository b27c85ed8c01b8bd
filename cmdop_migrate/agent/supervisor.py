"""Processes that the agent keeps beside itself: started again when they end, gone when the agent is.

Nothing of them can keep the agent from renewing leases: all that is shared is the pipe, their standard input, by whose
end they know that it is gone.
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

LOOK_EVERY = 1.0
_log = log.get("agent")


def of(config: Config) -> list[Ward]:
    """Those that the settings want."""
    found = []
    if config.relay is not None:
        found.append(link(config))
    if config.ready:
        found.append(ready(config))
    return found


def link(config: Config) -> Ward:
    """To a relay, once there is a credential to do it with."""
    end_timeout = 5.0  # it may have something left to tell: linkserve.LINGER
    words = ("cmdop_migrate", "link")
    return Ward(config, "link", words, Backoff(0.2, 30.0), 10.0, end_timeout, config.relay_credential.exists)


def ready(config: Config) -> Ward:
    """cli/forkserver/server.py. Nothing depends on it: a command that finds none does its work itself."""
    end_timeout = 0.2  # it has nothing to finish but to remove its socket; its forks go on, they are their clients'
    return Ward(config, "ready", ("cmdop_migrate.cli.forkserver.server",), Backoff(2.0, 60.0), 60.0, end_timeout)


class Ward:
    """One of them."""

    def __init__(
        self,
        config: Config,
        name: str,
        words: Sequence[str],
        backoff: Backoff,
        long: float,
        end_timeout: float,
        may_run: Callable[[], bool] = lambda: True,
    ) -> None:
        """`words` for Python to run as a module. Who lasted `long` did not fail at once."""
        self._config, self._name, self._words, self._backoff = config, name, words, backoff
        self._long, self._end_timeout, self._may_run = long, end_timeout, may_run
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(2 * self._end_timeout + 1.0)

    def _keep(self) -> None:
        while not self._over.is_set():
            if not self._may_run():
                self._over.wait(LOOK_EVERY)
                continue
            began = clock.boottime()
            try:
                status = self._run()
            except OSError as error:
                status = error.errno or 1
            if self._over.is_set():
                return
            if clock.boottime() - began > self._long:
                self._backoff.worked()
            _log.warning("the process %r ended with %d; it is started again", self._name, status)
            self._over.wait(self._backoff.failed())

    def _run(self) -> int:
        """One of it, for as long as it lasts or we are wanted."""
        with self._config.log_file.with_name(f"{self._name}.log").open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", *self._words],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                cwd="/",
                env={**os.environ, **settings.to_environment(self._config), "PYTHONPATH": _package()},
            )
        assert process.stdin is not None
        try:
            while process.poll() is None and not self._over.wait(0.1):
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
