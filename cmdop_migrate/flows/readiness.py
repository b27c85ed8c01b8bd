"""The agent's hold on the ready process (cli/ready.py): started when the agent is, started again when it ends, gone
when the agent is.

Nothing depends on it. A command that finds none does its work itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import cmdop_migrate
from cmdop_migrate import clock, log
from cmdop_migrate import config as settings
from cmdop_migrate.config import Config
from cmdop_migrate.relay.backoff import Backoff

LOOK_EVERY = 0.5
LONG = 60.0  # who lasted so long did not fail at once
END_TIMEOUT = 0.2  # it has nothing to finish but to remove its socket
_log = log.get("agent")


class Readiness:
    """Keeps one ready process, where the settings want one."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="readiness", daemon=True)

    def start(self) -> None:
        if self._config.ready:
            self._thread.start()

    def stop(self) -> None:
        """Its forks go on: they are their clients'."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(10 * END_TIMEOUT)

    def _keep(self) -> None:
        backoff = Backoff(2.0, LONG)
        while not self._over.is_set():
            began = clock.boottime()
            try:
                status = self._run()
            except OSError as error:
                status = error.errno or 1
            if self._over.is_set():
                return
            if clock.boottime() - began > LONG:
                backoff.worked()
            _log.info("the ready process ended with %d; it is started again", status)
            self._over.wait(backoff.failed())

    def _run(self) -> int:
        """One of them, for as long as it lasts or we are wanted."""
        with self._config.log_file.with_name("ready.log").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "cmdop_migrate.cli.ready"],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                cwd="/",
                env={**os.environ, **settings.to_environment(self._config), "PYTHONPATH": _package()},
            )
        assert process.stdin is not None
        try:
            while process.poll() is None and not self._over.wait(LOOK_EVERY):
                pass
        finally:
            process.stdin.close()
            try:
                process.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return process.returncode


def _package() -> str:
    return str(Path(cmdop_migrate.__file__).parent.parent)
