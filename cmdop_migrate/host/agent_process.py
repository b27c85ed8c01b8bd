"""One agent a host: the lock that says so, and how one is started when there is none."""

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

START_TIMEOUT = 30.0
TRIES = 3
ATTEND_EVERY = 2.0
_log = log.get("agent")


class Lock:
    """Held by the one agent of this host, as long as it lives."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, config: Config, patience: float = 0.0) -> Lock | None:
        """`patience`: who only looks whether there is an agent has the lock for a moment, too."""
        fd = locks.try_take(config.run_dir / "agent.lock", patience)
        return cls(fd) if fd is not None else None

    def note(self, relay: str | None) -> None:
        """Who has it, and to which relay it links: for `holder_of`. An agent without room to say so is one."""
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "relay": relay}).encode(), 0)
        except OSError as error:
            _log.warning("that an agent runs is not on record: %s", error)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class Running:
    """An agent that runs, and the relay that was set when it was started."""

    pid: int
    relay: str | None


def holder_of(config: Config) -> Running | None:
    """This host's agent; None when there is none, or it is just coming."""
    try:
        said = json.loads((config.run_dir / "agent.lock").read_bytes())
    except (OSError, ValueError):
        return None
    lock = Lock.take(config)
    if lock is not None:
        lock.release()
        return None
    return Running(said["pid"], said["relay"])


class Agent:
    """This host's agent, started if there was none: it boots while its starter goes on."""

    def __init__(self, config: Config) -> None:
        self._config = config
        lock = Lock.take(config)
        if lock is not None:
            lock.release()
        self._said = None if lock is None else _start(config)

    def ready(self) -> None:
        """Returns once an agent renews this host's leases. Raises what it failed with.

        An agent started on demand does not leave while a session's lock is held: whoever calls this with the lock of
        the session it starts has an agent for it.
        """
        for number in range(TRIES):
            said, self._said = self._said, None
            try:
                if said is not None:
                    _wait(self._config, said)
                lock = Lock.take(self._config)
                if lock is None:
                    return
                lock.release()
                self._said = _start(self._config)
            except Blocked:
                if number == TRIES - 1:
                    raise
                # Another command has just started one, or that one has just left: look again.
        raise Unexpected("agents come and go", f"See {_log_file(self._config)}.")

    def close(self) -> None:
        """It is not waited for after all."""
        if self._said is not None:
            os.close(self._said)
            self._said = None


@contextlib.contextmanager
def attended(config: Config) -> Iterator[None]:
    """As long as this lasts an agent that is gone is started anew: what stands still for want of a renewal, and whoever
    works at it, goes on again. Nobody waits for it here."""
    over = threading.Event()

    def look() -> None:
        while True:
            try:
                Agent(config).close()
            except OSError as error:  # no more processes, or a full disk: the next look may find it otherwise
                _log.warning("no agent could be started: %s", error)
            if over.wait(ATTEND_EVERY):
                return

    looker = threading.Thread(target=look, name="agent")
    looker.start()
    try:
        yield
    finally:
        over.set()
        looker.join()


def ensure(config: Config) -> None:
    """Starts an agent if this host has none, and waits until it renews. Raises what it failed with."""
    Agent(config).ready()


def _start(config: Config) -> int:
    """Where it will say that it is ready."""
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
    """It outlives whoever starts it, which may be a hook: it is none."""
    return {key: value for key, value in os.environ.items() if key != hooks.RUNNING}


def _wait(config: Config, reader: int) -> None:
    patience = START_TIMEOUT + margins.contender_wait(config.lease_ttl)  # it may wait for a dead one's name
    log_file = _log_file(config)
    with os.fdopen(reader, "rb") as said:
        if not select.select([said], [], [], patience)[0]:
            raise Unexpected("the agent did not get ready", f"See {log_file}.")
        word = said.read()
    if word != b"ready":
        raise _failure(word, log_file)


def _log_file(config: Config) -> Path:
    return config.log_file.with_name("agent.log")


def _failure(word: bytes, log_file: Path) -> CmdopError:
    if not word.startswith(b"{"):
        return Unexpected("the agent ended at once", f"See {log_file}.")
    return from_code(**json.loads(word))
