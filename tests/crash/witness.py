"""A session that notices any damage to its state, and the means to stop a command at a named step.

It counts, and checks the digest of its memory at each count: a number that is
missing, doubled or marked BAD is a session that was not left as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from cmdop_migrate import config
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host as LocalHost
from cmdop_migrate.host.resources import TEST_STOP
from tests.support.host import CM, Host, until
from tests.support.patience import bound

SMALL, LARGE = 2, 40  # MiB; what is larger than 32 has its memory served behind it
_PROGRAM = """
import hashlib, os, sys, time
memory = os.urandom({size} << 20) + b"witness"
digest, number = hashlib.sha256(memory).digest(), 0
while True:
    number += 1
    good = number % {every} or hashlib.sha256(memory).digest() == digest
    print("n", number, "ok" if good else "BAD", flush=True)
    time.sleep(0.03)
"""


@dataclass
class Witness:
    host: Host
    name: str
    session: str

    @classmethod
    def start(
        cls, host: Host, name: str = "w", size: int = SMALL, options: tuple[str, ...] = (), every: int | None = None
    ) -> Witness:
        program = _PROGRAM.format(size=size, every=every or (10 if size > SMALL else 1))
        facts = host.start(sys.executable, "-c", program, name=name, options=options)
        one = cls(host, name, facts["session"])
        until(one.numbers, 20, "it counts")
        return one

    def record(self) -> dict[str, Any]:
        path = self.host.state / "sessions" / self.session / "session.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    @property
    def state(self) -> str:
        (row,) = [one for one in self.host.sessions() if one["session"] == self.session]
        return str(row["state"])

    def numbers(self) -> list[int]:
        """All it counted so far: none left out, none twice, memory sound at each."""
        text = talk.output(LocalHost(config.load(environ=self.host.env())), self.session, None).data.decode()
        assert "BAD" not in text, text[-400:]
        found = [int(one) for one in re.findall(r"n (\d+) ok\r?\n", text)]
        assert found == list(range(1, len(found) + 1)), found
        return found

    def assert_runs(self) -> int:
        """It counts on, well past its next look at all of its memory; -> where it stands."""
        assert (state := self.state) == "running", state
        return self.assert_counts()

    def assert_counts(self) -> int:
        first = len(self.numbers())
        until(lambda: len(self.numbers()) > first + 12, 20, f"{self.name} counts on from {first}")
        return first

    def assert_parked(self) -> None:
        assert self.state == "parked"
        assert not self.host.pids(self.session)

    def restore(self, *options: str) -> dict[str, Any]:
        """Restore it, and check that it resumes exactly where it was parked."""
        before = len(self.numbers())
        facts = self.host.cm_json("restore", self.session, *options)
        assert self.assert_runs() >= before
        return facts


@contextlib.contextmanager
def stopped(host: Host, step: str, *args: str) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """`args`, at the beginning of `step` (of another flow: FLOW:STEP): the command line, and the process that stands
    there."""
    env = host.env(**{TEST_STOP: step if ":" in step else f"{args[0]}:{step}"})
    # In a session of its own: a stop at a step is no job of the test's terminal.
    cli = subprocess.Popen(
        [*host.prefix, *CM, "--json", *args],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        start_new_session=True,
    )
    standing: list[psutil.Process] = []  # a worker outlives its command
    try:
        standing.append(until(lambda: _standing(cli), 30, f"{args} stands at {step}"))
        yield cli, standing[0]
    finally:
        for one in [cli, *standing, *family(cli.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            cli.communicate(timeout=30)
        cli.kill()
        cli.wait()


def _standing(cli: subprocess.Popen[bytes]) -> psutil.Process | None:
    assert cli.poll() is None, cli.communicate()
    for one in [psutil.Process(cli.pid), *family(cli.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() == psutil.STATUS_STOPPED and "cmdop_migrate" in one.cmdline():
                return one
    return None


def family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def find(pid: int, kind: str) -> psutil.Process | None:
    """CRIU's worker below `pid`, which renames itself."""
    words = {"swrk": (" swrk ", "--rpc")}[kind]
    for one in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(word in " ".join(one.cmdline()) for word in words):
                return one
    return None


@contextlib.contextmanager
def dumping(one: Witness, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """A checkpoint whose CRIU is stopped while it reads memory: its code is in every process of the session, which it
    has thawed for that."""
    host = one.host
    cli = subprocess.Popen(
        [*CM, "--json", "checkpoint", one.name, *options],
        env=host.env(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
    )  # fmt: skip
    criu = None
    try:
        criu = until(lambda: find(cli.pid, "swrk"), 20, "CRIU runs")
        log, group = host.state / "sessions" / one.session / "dump" / "dump.log", host.group(one.session)
        processes, end = len(host.pids(one.session)), time.monotonic() + bound(20)
        while not log.exists() or log.read_bytes().count(b"Dumping pages (type") < processes:
            assert time.monotonic() < end and cli.poll() is None
        criu.suspend()
        assert cgroup.is_traced(group) and not cgroup.is_to_freeze(group), "the dump was over already"
        yield cli, criu
    finally:
        if criu is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                criu.resume()
        cli.kill()
        cli.communicate()


def finished(cli: subprocess.Popen[bytes], within: float = 60) -> tuple[int, dict[str, Any]]:
    """Its exit status and what it answered; it said nothing that looks like a bug."""
    out, err = cli.communicate(timeout=bound(within))
    assert b"Traceback" not in out + err, (out + err).decode()
    return cli.returncode, json.loads(out) if out else {}


def show(title: str, rows: list[tuple[str, ...]], say: Callable[[str], None]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    say(f"\n{title}")
    for row in rows:
        say("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def gone(process: psutil.Process | subprocess.Popen[bytes], within: float = 10) -> None:
    """Kill it and wait until it is really over."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    end = time.monotonic() + bound(within)
    while psutil.pid_exists(process.pid) and time.monotonic() < end:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE:
                return
        time.sleep(0.01)
