"""A host that is cut off, or sleeps, while another takes its session over: never two that run."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate.clock import boottime
from cmdop_migrate.errors import CmdopError
from cmdop_migrate.flows import talk
from cmdop_migrate.flows.tools import TEST_STOP
from cmdop_migrate.session.channel import HolderGone
from tests import fences
from tests.hosts import CM, Host, pair, until

# Stamps the time, as often as it can, into a file of the host named after its token; and does what it is told.
# The time is read before the token: what is written under a token was true under that token or before.
PROGRAM = """
import struct, sys, threading, time
def note(kind, text):
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    token = open("/run/cmdop-migrate/token").read().strip()
    with open(f"{sys.argv[1]}/{kind}-{token}", "ab") as file:
        file.write(struct.pack("d", now))
def stamp():
    while True:
        note("ran", "")
        time.sleep(0.001)
threading.Thread(target=stamp, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    note("did", line)
"""


class Stamped:
    def __init__(self, host: Host, directory: Path) -> None:
        directory.mkdir()
        self.directory, self.ahead = directory, 0.0
        command = (sys.executable, "-c", PROGRAM, str(directory))
        self.session: str = host.start(*command, name="w", options=("--share", str(directory)))["session"]
        until(lambda: self.times("ran", 1), 10, "it runs")

    def restored_on(self, host: Host) -> None:
        """A restored session's clocks go on from where it was dumped, in a time namespace of its own."""
        offsets = Path(f"/proc/{host.pids(self.session)[0]}/timens_offsets").read_text().splitlines()
        _, seconds, nanoseconds = next(line.split() for line in offsets if line.startswith("boottime"))
        self.ahead = float(seconds) + float(nanoseconds) / 1e9

    def times(self, kind: str, token: int) -> list[float]:
        """When it ran under `token`, or did what it was told, on the machine's clock."""
        ahead = self.ahead if token == 2 else 0.0
        try:
            data = (self.directory / f"{kind}-{token}").read_bytes()
        except FileNotFoundError:
            return []
        return [one - ahead for (one,) in struct.iter_unpack("d", data[: len(data) // 8 * 8])]


@contextlib.contextmanager
def told_all_the_time(session: str, *hosts: Host) -> Iterator[None]:
    """Clients on every host who type all the time, wherever they are let in."""
    over = threading.Event()

    def client(host: Host) -> None:
        while not over.is_set():
            with contextlib.suppress(CmdopError, HolderGone, OSError):
                talk.send(fences.records(host), session, b"go\r", "client")
            time.sleep(0.01)

    threads = [threading.Thread(target=client, args=(host,)) for host in hosts]
    for one in threads:
        one.start()
    try:
        yield
    finally:
        over.set()
        for one in threads:
            one.join()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with pair(tmp_path) as both:
        yield both


def assert_superseded(host: Host, session: str) -> None:
    """It knows that it was, and nothing of it is left there."""
    until(lambda: fences.record(host, session)["phase"] == "exited", 15, "it ends there")
    assert fences.record(host, session)["exit"]["reason"] == "superseded by token 2 on host-b"
    until(lambda: not (host.state / "sessions" / session / "layers").exists(), 5, "its files are gone")
    assert not host.pids(session)
    host.assert_clean(ended=True)
    assert fences.event(host, session, "superseded")["by"] == 2


@pytest.mark.parametrize("cut", ["agent", "agent and socket"])
def test_partition(hosts: tuple[Host, Host], tmp_path: Path, cut: str) -> None:
    a, b = hosts
    stamped = Stamped(a, tmp_path / "shared")
    session = stamped.session
    a.ok("checkpoint", "w", "--leave-running")
    agent = a.agent_pid()
    assert agent is not None
    b.fails("restore", session, status=5, code="fenced")
    with fences.halted(agent):
        with told_all_the_time(session, a, b):
            until(lambda: len(stamped.times("did", 1)) > 3, 10, "A does what it is told")
            if cut != "agent":
                (a.run / f"{session}.sock").rename(a.dir / "gone.sock")
            b.ok("restore", session, "--wait", "40s")
            until(lambda: len(stamped.times("did", 2)) > 20, 10, "B does what it is told")
        if cut == "agent":
            error = a.fails("checkpoint", "w", status=5, code="fenced")
            assert "host-b" in error["message"]
    stamped.restored_on(b)
    runs_from = fences.event(b, session, "restored")["boottime"]
    assert fences.event(a, session, "fenced")["boottime"] < runs_from
    for kind in ("ran", "did"):
        before, after = stamped.times(kind, 1), [one for one in stamped.times(kind, 2) if one >= runs_from]
        assert before and after and max(before) < runs_from
    if cut != "agent":
        (a.dir / "gone.sock").rename(a.run / f"{session}.sock")
    assert_superseded(a, session)
    last = len(stamped.times("ran", 1))
    time.sleep(0.3)
    assert len(stamped.times("ran", 1)) == last and b.sessions()[0]["state"] == "running"
    assert fences.lease(a, session)["holder"] == fences.lease(b, session)["holder"] == "host-b"


@pytest.mark.parametrize("mode", ["park", "leave running"])
def test_late_commit_is_refused_by_the_store(hosts: tuple[Host, Host], tmp_path: Path, mode: str) -> None:
    """A checkpoint that stood still, all uploaded, while another host took over."""
    a, b = hosts
    stamped = Stamped(a, tmp_path / "shared")
    session = stamped.session
    first = a.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    agent = a.agent_pid()
    assert agent is not None
    options = ["--leave-running"] if mode != "park" else []
    late = subprocess.Popen(
        [*CM, "--json", "checkpoint", "w", *options],
        env=a.env(**{TEST_STOP: "checkpoint:commit"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        until(lambda: Path(f"/proc/{late.pid}/stat").read_text().split()[2] == "T", 20, "it stands at commit")
        with fences.halted(agent):
            b.ok("restore", session, "--wait", "40s")
            os.kill(late.pid, signal.SIGCONT)
            out, _ = late.communicate(timeout=20)
            assert late.returncode == 5, out
            runs_from = fences.event(b, session, "restored")["boottime"]
            assert max(stamped.times("ran", 1)) < runs_from
    finally:
        late.kill()
        late.communicate()
    assert_superseded(a, session)
    assert fences.lease(b, session)["checkpoint"] == first
    assert fences.lease(b, session)["holder"] == "host-b"


@pytest.mark.parametrize("order", ["session, holder, agent", "session, agent, holder"])
def test_a_machine_that_slept(
    hosts: tuple[Host, Host], tmp_path: Path, order: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything of A stops, wakes too late, and the session first."""
    a, b = hosts
    stamped = Stamped(a, tmp_path / "shared")
    session = stamped.session
    a.ok("checkpoint", "w", "--leave-running")
    agent = a.agent_pid()
    assert agent is not None
    pids = {"agent": [agent], "holder": [a.holder(session)], "session": a.pids(session)}
    with fences.halted(*(pid for part in pids.values() for pid in part)):
        b.ok("restore", session, "--wait", "40s")
        until(lambda: stamped.times("ran", 2), 10, "B runs")
        woken = boottime()
        for part in order.split(", "):
            for pid in pids[part]:
                os.kill(pid, signal.SIGCONT)
    assert_superseded(a, session)
    ran = [one - woken for one in stamped.times("ran", 1) if one >= woken]
    with capsys.disabled():
        window = f"{max(ran) * 1000:.2f} ms" if ran else "not at all"
        print(f"\n  woken in the order {order}: the session ran {window} before it was stopped")
    assert not ran or max(ran) < 1.0
    assert b.sessions()[0]["state"] == "running"
