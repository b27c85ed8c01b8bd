"""A host of the demo's own on this machine: two directories, one config file, and nothing of it left afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from cmdop_migrate import config as settings
from cmdop_migrate.holder import cgroup

PREFIX = "cmdop-demo."
TIMEOUT = 30.0


class Trouble(Exception):
    """What the demo promised did not happen."""


class Place:
    def __enter__(self) -> Place:
        _clear_old()
        self.top = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Held while this demo lives: the next one clears up after those that were killed.
        self._lock = os.open(self.top / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # All NAT rules of a machine name one range, so it is the one that real sessions use.
        subnet = settings.load().subnet
        lines = {"host": "demo", "state_dir": f"{self.top}/state", "run_dir": f"{self.top}/run", "subnet": subnet}
        (self.top / "config.toml").write_text("".join(f'{key} = "{value}"\n' for key, value in lines.items()))
        self.environment = _environment(self.top)
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            _clear(self.top)
            os.close(self._lock)
        finally:
            signal.signal(signal.SIGINT, before)

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "cmdop_migrate", *arguments]

    def json(self, *arguments: str) -> tuple[Any, float]:
        """What the command answers, and how long it took. Trouble when it fails."""
        return _call(self.environment, *arguments)


def _environment(top: Path) -> dict[str, str]:
    """Ours without settings of the real host, which would win over the file."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(settings.ENV_PREFIX)}
    return {**kept, settings.CONFIG_ENV: str(top / "config.toml"), "PYTHONPATH": str(Path(__file__).parents[2])}


def _call(environment: dict[str, str], *arguments: str) -> tuple[Any, float]:
    argv = [sys.executable, "-m", "cmdop_migrate", "--json", *arguments]
    began = time.monotonic()
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    seconds = time.monotonic() - began
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise Trouble(f"{arguments[0]} said no JSON: {done.stdout[-200:]}{done.stderr[-500:]}") from None
    if "error" in answer:
        raise Trouble(f"{arguments[0]}: {answer['error']['message']}. {answer['error']['hint']}")
    return answer, seconds


def _clear(top: Path) -> None:
    """Ends the sessions of that host and removes it."""
    identity = top / "state" / "host-id"
    mount = cgroup.mount_point()
    if identity.exists() and mount is not None:
        holders = Path(cgroup.path_of(mount, identity.read_text(encoding="ascii").strip(), "holders"))
        until = time.monotonic() + 2 * TIMEOUT
        # Repeatedly: one that was just starting is listed a moment later, and a holder leaves a moment after its end.
        while not _gone(holders):
            if time.monotonic() > until:
                raise Trouble(f"the demo's session does not end; its files are in {top}")
            with contextlib.suppress(Trouble):  # one may end, or appear, between the look and the kill
                _end_sessions(_environment(top))
            time.sleep(0.05)
    shutil.rmtree(top)


def _end_sessions(environment: dict[str, str]) -> None:
    for session in _call(environment, "ls")[0]["sessions"]:
        if session["state"] not in ("parked", "exited"):  # these have no process, only files
            _call(environment, "kill", session["session"], "--signal", "KILL")


def _gone(holders: Path) -> bool:
    """Whether no holder is left, and the agent has seen that; removes their groups, and the host's around them."""
    host = holders.parent
    try:
        if host.exists():
            for directory in (*filter(Path.is_dir, host.iterdir()), host):
                directory.rmdir()
    except OSError:
        return False
    return True


def _clear_old() -> None:
    for top in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(top / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another one that is starting or ending right now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (top / "config.toml").exists():
                _clear(top)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
