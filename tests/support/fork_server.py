"""Inspect the fork server of a test's host, and its forks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from cmdop_migrate.holder import cgroup
from tests.support.host import CM, Host, until

OFF = {"CMDOP_MIGRATE_READY": "0"}
# Asks for a fork, and says whether there is one; never `go`.
ASKER = """
import sys
from cmdop_migrate.cli.forkserver import client
forked = client.ForkedCommand.request(sys.argv.pop(1))
print("ready" if forked else "no", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Done:
    status: int
    out: bytes
    err: bytes
    faults: int  # pages it touched: a process that did the work itself has loaded all it takes


def process(host: Host) -> psutil.Process | None:
    """The host's ready process, whether or not it listens yet."""
    if not (host.state / "host-id").exists():
        return None
    for pid in cgroup.pids(host.group("agent")):
        with contextlib.suppress(psutil.Error):
            one = psutil.Process(pid)
            if "cmdop_migrate.cli.forkserver.server" in one.cmdline():
                return one
    return None


def wait(host: Host) -> psutil.Process:
    """It answers."""

    def answers() -> psutil.Process | None:
        found = process(host)
        return found if found and ask(host, "ls") == "ready" else None

    found = until(answers, 30, "a ready process")
    until(lambda: not forks(host), 5, "the fork that was asked for ends")
    return found


def lives(one: psutil.Process) -> bool:
    """Return True if it runs; False for a zombie, too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    return False


def forks(host: Host) -> list[psutil.Process]:
    found = process(host)
    with contextlib.suppress(psutil.NoSuchProcess):
        return [one for one in found.children() if lives(one)] if found else []
    return []


def run(host: Host, *args: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()) -> Done:
    """A command to its end, with what it cost its own process."""
    with subprocess.Popen(
        [*prefix, *CM, *args],
        env=host.env(**(env or {})),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    ) as started:
        assert started.stdout is not None and started.stderr is not None
        out, err = started.stdout.read(), started.stderr.read()
        _, status, usage = os.wait4(started.pid, 0)
        started.returncode = os.waitstatus_to_exitcode(status)
    return Done(started.returncode, out, err, usage.ru_minflt)


@contextlib.contextmanager
def asking(host: Host, *args: str, prefix: tuple[str, ...] = (), **env: str) -> Iterator[tuple[int, str]]:
    """(its pid, `ready` or `no`); the fork waits for a word that never comes."""
    with subprocess.Popen(
        [*prefix, sys.executable, "-c", ASKER, str(host.run), *args],
        env=host.env(**env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        text=True,
    ) as asker:
        assert asker.stdin is not None and asker.stdout is not None
        try:
            yield asker.pid, asker.stdout.readline().strip()
        finally:
            asker.kill()


def ask(host: Host, *args: str, prefix: tuple[str, ...] = (), **env: str) -> str:
    with asking(host, *args, prefix=prefix, **env) as (_, answer):
        return answer


@contextlib.contextmanager
def begun(host: Host, *args: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A command while it runs."""
    started = subprocess.Popen(
        [*CM, *args],
        env=host.env(**(env or {})),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        start_new_session=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def fork_of(host: Host) -> psutil.Process:
    """The one fork that is at work."""
    (one,) = until(lambda: forks(host), 10, "a fork")
    return one


def hook(host: Host, text: str) -> Path:
    """What is done before a session is frozen."""
    path = host.dir / "hooks" / "pre-freeze.d" / "one"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
