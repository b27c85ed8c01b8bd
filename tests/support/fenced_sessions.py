"""Run sessions that notice when they are frozen, and stop or kill commands and agents at a named step."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from cmdop_migrate import config
from cmdop_migrate.clock import boottime
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host as LocalHost
from cmdop_migrate.host.resources import TEST_STOP
from tests.support.host import Host, until

COUNT = "while :; do echo n $((++i)); sleep 0.05; done"
ECHO = 'while read -r line; do echo "did $line"; done'


def counter(host: Host, name: str = "w", *options: str) -> str:
    """Start a session that counts; return its id once it does."""
    session: str = host.start("bash", "-c", COUNT, name=name, options=options)["session"]
    until(lambda: numbers(host, session), 20, "it counts")
    return session


def records(host: Host) -> LocalHost:
    return LocalHost(config.load(environ=host.env()))


def numbers(host: Host, session: str) -> list[int]:
    """Return all numbers counted so far on this host, and assert that none is missing or doubled. This runs in the test
    process, so that no command starts an agent."""
    text = talk.output(records(host), session, None).data.decode()
    found = [int(one) for one in re.findall(r"n (\d+)\r?\n", text)]
    assert found == list(range(1, len(found) + 1)), found
    return found


def counts_on(host: Host, session: str, within: float = 20) -> int:
    first = len(numbers(host, session))
    until(lambda: len(numbers(host, session)) > first + 3, within, f"{session} counts on from {first}")
    return first


def stands_still(host: Host, session: str, seconds: float = 0.4) -> int:
    """Assert that the session counts no further; return its last number."""
    before = len(numbers(host, session))
    time.sleep(seconds)
    assert len(numbers(host, session)) == before
    assert is_frozen(host, session)
    return before


def is_frozen(host: Host, session: str) -> bool:
    return cgroup.is_frozen(host.group(session))


def record(host: Host, session: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((host.state / "sessions" / session / "session.json").read_text())
    return found


def event(host: Host, session: str, kind: str) -> dict[str, Any]:
    """Return the last event of that kind."""
    found = [one for one in host.events(session) if one["event"] == kind]
    assert found, f"no {kind} in {host.events(session)}"
    return found[-1]


def wait_event(host: Host, session: str, kind: str, within: float = 20) -> dict[str, Any]:
    until(lambda: any(one["event"] == kind for one in host.events(session)), within, f"{kind} of {session}")
    return event(host, session, kind)


def lease(host: Host, session: str) -> dict[str, Any]:
    return host.cm_json("lease", "show", session)


def has_lock(pid: int) -> bool:
    """Return whether a process holds a write lock on a file."""
    rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(row[3:5] == ["WRITE", str(pid)] and row[1] == "POSIX" for row in rows)


@contextlib.contextmanager
def halted(*pids: int) -> Iterator[None]:
    """Stop processes with SIGSTOP for the length of the block. A process that holds the lock of the lease database is
    stopped only after it has released it: otherwise every other user of the database would block too."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            for _ in range(200):
                if not has_lock(pid):
                    break
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.005)
                os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def away(path: Path) -> Iterator[None]:
    """Make a directory unreachable for the length of the block: a plain file takes its place."""
    hidden = path.with_name(path.name + ".away")
    hidden.write_text("not a directory")
    _swap(path, hidden)
    try:
        yield
    finally:
        _swap(path, hidden)
        hidden.unlink()


def _swap(one: Path, other: Path) -> None:
    """Exchange two paths atomically: a process that finds neither of them would create a directory."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, bytes(one), -100, bytes(other), 2) != 0:  # AT_FDCWD, RENAME_EXCHANGE
        raise OSError(ctypes.get_errno(), "renameat2")


@contextlib.contextmanager
def stopped_at(host: Host, step: str, *args: str) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """Run the command `args`, and yield it with its process that is stopped where `step` begins; kill both in the end."""
    stop = {TEST_STOP: f"{args[0]}:{step}"}
    cli = subprocess.Popen(
        host.argv("--json", *args, env=stop),
        env=host.env(**stop),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        start_new_session=True,
    )
    standing: psutil.Process | None = None
    try:
        standing = until(lambda: _standing(cli), 30, f"{args} stands at {step}")
        assert standing is not None
        yield cli, standing
    finally:
        if standing is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                standing.kill()
        cli.kill()
        cli.communicate()


def kill_at(host: Host, step: str, *args: str) -> None:
    """Run the command `args`, and kill it with its children, but not its daemons, where `step` begins."""
    with stopped_at(host, step, *args) as (cli, standing):
        above = [one.pid for one in standing.parents()]
        for one in (standing.pid, *above[: above.index(cli.pid) + 1 if cli.pid in above else 0], cli.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)


def _standing(cli: subprocess.Popen[bytes]) -> psutil.Process | None:
    assert cli.poll() is None, cli.communicate()
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in [psutil.Process(cli.pid), *psutil.Process(cli.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.status() == psutil.STATUS_STOPPED and "cmdop_migrate" in one.cmdline():
                    return one
    return None


def die(host: Host, session: str) -> None:
    """Kill everything of this session, as the death of its host does: no process of it can report anything."""
    pids = [host.agent_pid(), host.holder(session), *host.pids(session)]
    for pid in pids:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def since(moment: float) -> float:
    return boottime() - moment


def percentile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
