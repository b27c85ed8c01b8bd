"""Make sure that this host has exactly one agent: the lock that it holds, and how it is started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cmdop_migrate
from cmdop_migrate import config as settings
from cmdop_migrate import log
from cmdop_migrate.config import Config
from cmdop_migrate.errors import Blocked, CmdopError, Unexpected, from_code
from cmdop_migrate.host import hooks
from cmdop_migrate.lease import margins
from cmdop_migrate.util import locks

START_TIMEOUT = 30.0  # seconds for an agent to get ready, besides waiting for its host's name
START_TRIES = 3
ATTEND_EVERY = 2.0  # seconds between two checks that an agent runs
_log = log.get("agent")


class Lock:
    """Hold the lock of the one agent of this host, as long as it lives."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, config: Config, timeout: float = 0.0) -> Lock | None:
        """Take the lock, or return None if an agent has it. `timeout`: a process that only checks whether an agent runs
        has the lock for a moment, too."""
        fd = locks.try_take(config.run_dir / "agent.lock", timeout)
        return cls(fd) if fd is not None else None

    def note(self, relay: str | None) -> None:
        """Write pid and relay URL into the lock file, for `holder_of`. Failure (disk full) is logged and ignored."""
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "relay": relay}).encode(), 0)
        except OSError as error:
            _log.warning("pid and relay of the agent could not be written to its lock file: %s", error)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class RunningAgent:
    """Describe an agent that runs: its pid, and the relay that was configured when it was started."""

    pid: int
    relay: str | None


def holder_of(config: Config) -> RunningAgent | None:
    """Return this host's agent; None if none runs, or it is just starting."""
    try:
        noted = json.loads((config.run_dir / "agent.lock").read_bytes())
    except (OSError, ValueError):
        return None
    lock = Lock.take(config)
    if lock is not None:
        lock.release()
        return None
    return RunningAgent(noted["pid"], noted["relay"])


class Agent:
    """Represent this host's agent, started if none ran. It starts up while its starter continues."""

    def __init__(self, config: Config) -> None:
        self._config = config
        lock = Lock.take(config)
        if lock is not None:
            lock.release()
        self._ready_pipe = None if lock is None else _start(config)

    def ready(self) -> None:
        """Return once an agent renews this host's leases. Raise what it failed with.

        An agent started on demand does not exit while a session's lock is held: a caller that has the lock of the
        session it starts has an agent for it.
        """
        for number in range(START_TRIES):
            pipe, self._ready_pipe = self._ready_pipe, None
            try:
                if pipe is not None:
                    _wait(self._config, pipe)
                lock = Lock.take(self._config)
                if lock is None:
                    return
                lock.release()
                self._ready_pipe = _start(self._config)
            except Blocked:
                if number == START_TRIES - 1:
                    raise
                # Another command has just started an agent, or one has just exited: look again.
        raise Unexpected(f"the agent exited {START_TRIES} times during start-up", f"See {_log_file(self._config)}.")

    def close(self) -> None:
        """Stop waiting for the agent that was started."""
        if self._ready_pipe is not None:
            os.close(self._ready_pipe)
            self._ready_pipe = None


@contextlib.contextmanager
def attended(config: Config) -> Iterator[None]:
    """Start an agent again whenever it is gone, for the duration of the block: a session that is frozen because its
    lease was not renewed, and a command that works on it, resume. This does not wait for the agent."""
    over = threading.Event()

    def look() -> None:
        while True:
            try:
                Agent(config).close()
            except OSError as error:  # too many processes, or a full disk: the next attempt may work
                _log.warning("no agent could be started: %s", error)
            if over.wait(ATTEND_EVERY):
                return

    watcher = threading.Thread(target=look, name="agent")
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def ensure(config: Config) -> None:
    """Start an agent if this host has none, and wait until it renews leases. Raise what it failed with."""
    Agent(config).ready()


def _start(config: Config) -> int:
    """Start an agent. Return the pipe that it reports on when it is ready."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "cmdop_migrate", "agent", "--until-idle", "--ready-fd", str(writer)]
    package = str(Path(cmdop_migrate.__file__).parent.parent)
    log_file = _log_file(config)
    log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log_file.open("ab") as errors:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=(writer,),
            start_new_session=True,
            cwd="/",
            env={**_environment(), **settings.to_environment(config), "PYTHONPATH": package},
        )
    os.close(writer)
    return reader


def _environment() -> dict[str, str]:
    """Return the environment for the agent, without the hook-recursion marker: the agent outlives a hook that starts
    it."""
    return {key: value for key, value in os.environ.items() if key != hooks.RUNNING}


def _wait(config: Config, reader: int) -> None:
    # The agent may wait until a dead installation's lease of this host's name runs out.
    """Wait until the agent reports on its pipe that it is ready. Raise what it failed with."""
    timeout = START_TIMEOUT + margins.contender_wait(config.lease_ttl)
    log_file = _log_file(config)
    with os.fdopen(reader, "rb") as pipe:
        if not select.select([pipe], [], [], timeout)[0]:
            raise Unexpected("the agent did not get ready", f"See {log_file}.")
        message = pipe.read()
    if message != b"ready":
        raise _failure(message, log_file)


def _log_file(config: Config) -> Path:
    return config.log_file.with_name("agent.log")


def _failure(message: bytes, log_file: Path) -> CmdopError:
    if not message.startswith(b"{"):
        return Unexpected("the agent exited during start-up", f"See {log_file}.")
    return from_code(**json.loads(message))
