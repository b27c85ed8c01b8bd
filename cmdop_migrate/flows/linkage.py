"""The agent's hold on the link: a process of its own, started again when it ends, gone when the agent is.

Nothing of it can keep the agent from renewing leases: all that is shared is the
pipe by whose end the link knows that its agent is gone.
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

LOOK_EVERY = 1.0
LONG = 10.0  # who lasted so long did not fail at once
END_TIMEOUT = 2.0
_log = log.get("agent")


class Linkage:
    """Keeps a link running while there is a relay to link to and a credential to do it with."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="linkage", daemon=True)

    def start(self) -> None:
        if self._config.relay is not None:
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(2 * END_TIMEOUT)

    def _keep(self) -> None:
        backoff = Backoff(0.2, 30.0)
        while not self._over.is_set():
            if not self._config.relay_credential.exists():
                self._over.wait(LOOK_EVERY)
                continue
            began = clock.boottime()
            try:
                status = self._run()
            except OSError as error:
                status = error.errno or 1
            if self._over.is_set():
                return
            if clock.boottime() - began > LONG:
                backoff.worked()
            _log.warning("the link to the relay ended with %d; it is started again", status)
            self._over.wait(backoff.failed())

    def _run(self) -> int:
        """One link, for as long as it lasts or we are wanted."""
        with self._config.log_file.with_name("link.log").open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "cmdop_migrate", "link"],
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
                process.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return process.returncode


def _package() -> str:
    return str(Path(cmdop_migrate.__file__).parent.parent)
