"""Run a session that records when it runs and what it receives, so that two copies that run simultaneously are detected."""

from __future__ import annotations

import contextlib
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cmdop_migrate.errors import CmdopError
from cmdop_migrate.host import talk
from cmdop_migrate.session.holder_client import HolderGone
from tests.support import fenced_sessions
from tests.support.host import Host, until

# Stamps the time, as often as it can, into a file of the host named after its fencing token; also for each input line.
# The time is read before the token: what is written under a token was true under that token or before.
# Nothing is noted while a file `quiet` is there: what is open when it is frozen, another host must have as well.
PROGRAM = """
import os, struct, sys, threading, time
def note(kind, text):
    while os.path.exists(f"{sys.argv[1]}/quiet"):
        time.sleep(0.001)
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
    """Read the records of a session. `directory` is their path on its hosts; `seen` maps tokens to other paths from here."""

    def __init__(self, host: Host, directory: Path, name: str = "w", seen: Callable[[int], Path] | None = None) -> None:
        self._seen, self.ahead = seen or (lambda token: directory), 0.0
        self._seen(1).mkdir(exist_ok=True)
        command = (sys.executable, "-c", PROGRAM, str(directory))
        self.session: str = host.start(*command, name=name, options=("--share", str(directory)))["session"]
        until(lambda: self.times("ran", 1), 30, "it runs")

    def save(self, host: Host) -> str:
        """Make a checkpoint with no record half-written; the session keeps running."""
        quiet = self._seen(1) / "quiet"
        quiet.touch()
        try:
            time.sleep(0.2)
            saved: str = host.cm_json("checkpoint", self.session, "--leave-running")["checkpoint"]
        finally:
            quiet.unlink()
        return saved

    def restored_on(self, host: Host) -> None:
        """Restore the session on a host. Its clocks continue from the dump, in its own time namespace."""
        offsets = Path(f"/proc/{host.pids(self.session)[0]}/timens_offsets").read_text().splitlines()
        _, seconds, nanoseconds = next(line.split() for line in offsets if line.startswith("boottime"))
        self.ahead = float(seconds) + float(nanoseconds) / 1e9

    def times(self, kind: str, token: int) -> list[float]:
        """Return when the session ran under `token`, or obeyed an input, on the machine's clock."""
        ahead = self.ahead if token == 2 else 0.0
        try:
            data = (self._seen(token) / f"{kind}-{token}").read_bytes()
        except FileNotFoundError:
            return []
        return [one - ahead for (one,) in struct.iter_unpack("d", data[: len(data) // 8 * 8])]


@contextlib.contextmanager
def told_all_the_time(session: str, *hosts: Host) -> Iterator[None]:
    """Run clients on every host that type all the time, wherever they are admitted."""
    over = threading.Event()

    def client(host: Host) -> None:
        while not over.is_set():
            with contextlib.suppress(CmdopError, HolderGone, OSError):
                talk.send(fenced_sessions.records(host), session, b"go\r", "client")
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


def assert_superseded(host: Host, session: str) -> None:
    """Assert that the host records the session as superseded, and that nothing of it is left there."""
    until(lambda: fenced_sessions.record(host, session)["phase"] == "exited", 15, "it ends there")
    assert fenced_sessions.record(host, session)["exit"]["reason"] == "superseded by token 2 on host-b"
    until(lambda: not (host.state / "sessions" / session / "layers").exists(), 5, "its files are gone")
    assert not host.pids(session)
    host.assert_clean(ended=True)
    assert fenced_sessions.event(host, session, "superseded")["by"] == 2
