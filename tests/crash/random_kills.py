"""Kill processes at random moments of a dump, again and again, and count the sessions that did not survive.

    python -m tests.crash.random_kills --kills 1000 --seconds 3000 --seed 1

prints one row per kind of victim:

    command   the command line        fork    the process that works for it, forked from the ready process
    unit      all of the command's cgroup, as a service manager ends a unit
    agent     the host's agent        criu    the CRIU that dumps        guard   the process that watches that CRIU

The session has three processes and six threads. It counts on only when all its threads have run since the last count; at each count a message
went round a TCP connection inside the session, and the digest of its memory is right. Every dump is a
`checkpoint --leave-running`, so that one session is dumped many times. `inside` counts the kills of CRIU that left its
code in the session, which the guard then put right.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cmdop_migrate import config
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host as LocalHost
from tests.crash.witness import Witness, show
from tests.support import fork_server
from tests.support.host import Host, a_host, open_files, until
from tests.support.patience import bound

VICTIMS = ("command", "fork", "unit", "agent", "criu", "guard")
SETTLE = 60.0  # seconds in which a session must run again after a kill
SAMPLES = 4  # dumps that are left alone, to learn how long one takes
INSIDE = b"CRIU died with its code in the session"  # in the log
_PROGRAM = """
import hashlib, os, socket, threading, time
memory = os.urandom(2 << 20) + b"witness"
digest, number, ticks = hashlib.sha256(memory).digest(), 0, [0] * 4
os.umask(0o027)

def tick(place):
    while True:
        ticks[place] += 1
        time.sleep(0.005)

def echo(server):
    peer = server.accept()[0]
    while data := peer.recv(64):
        peer.sendall(data)

server = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    echo(server)
    os._exit(1)
link = socket.create_connection(server.getsockname())
server.close()
for place in range(4):
    threading.Thread(target=tick, args=(place,), daemon=True).start()
while True:
    number += 1
    before = list(ticks)
    time.sleep(0.03)
    link.sendall(b"%d" % number)
    while not all(now > then for now, then in zip(ticks, before)):
        time.sleep(0.005)
    bad = "" if link.recv(64) == b"%d" % number else " link"
    bad += "" if hashlib.sha256(memory).digest() == digest else " memory"
    bad += "" if os.umask(0o027) == 0o027 else " umask"
    print("n", number, "BAD" + bad if bad else "ok", flush=True)
"""


@dataclass
class Tally:
    """What became of the sessions, for one kind of victim."""

    kills: int = 0
    missed: int = 0  # the victim had ended before its moment came
    inside: int = 0  # CRIU's code was in the session
    ended: list[str] = field(default_factory=list)  # the reason on record


class Campaign:
    """One host, one session at a time. A session that was ended is replaced, and counted."""

    def __init__(self, host: Host, seed: int) -> None:
        self.host, self.random = host, random.Random(seed)
        self.tallies = {victim: Tally() for victim in VICTIMS}
        self.records = LocalHost(config.load(environ=host.env()))
        self.made = 0
        self.unit = f"{cgroup.mount_point()}/random-kills-{os.getpid()}"
        self.session = self._start()
        self.duration = statistics.median(self._sample() for _ in range(SAMPLES))

    def close(self) -> None:
        cgroup.remove(self.unit)

    def _start(self) -> Witness:
        self.made += 1
        name = f"w{self.made}"
        one = Witness(self.host, name, self.host.start(sys.executable, "-c", _PROGRAM, name=name)["session"])
        until(one.numbers, 20, "it counts")
        return one

    @property
    def log(self) -> Path:
        return self.host.state / "sessions" / self.session.session / "dump" / "dump.log"

    def _repairs(self) -> int:
        return (self.host.state / "log" / "cmdop-migrate.log").read_bytes().count(INSIDE)

    @contextlib.contextmanager
    def dump(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start a checkpoint, and yield it as soon as the session is frozen: CRIU is about to enter it."""
        self.log.unlink(missing_ok=True)  # of one that was killed
        cgroup.create(self.unit)
        with fork_server.begun(self.host, "checkpoint", self.session.name, "--leave-running") as command:
            with contextlib.suppress(ProcessLookupError):
                cgroup.join(self.unit, command.pid)
            end = time.monotonic() + bound(SETTLE)
            group = self.host.group(self.session.session)
            while not cgroup.is_to_freeze(group) and command.poll() is None:
                assert time.monotonic() < end, "the session is not frozen"
                time.sleep(0.0005)
            yield command

    def _sample(self) -> float:
        with self.dump() as command:
            began = time.monotonic()
            group = self.host.group(self.session.session)
            while cgroup.is_to_freeze(group) or criu_of(self.log):
                assert time.monotonic() < began + bound(SETTLE)
                time.sleep(0.001)
            took = time.monotonic() - began
            _, errors = command.communicate(timeout=SETTLE)
            assert command.returncode == 0, errors
            return took

    def kill(self, victim: str) -> None:
        """Kill one `victim` at a random moment of one dump, and see what becomes of the session."""
        tally, repairs = self.tallies[victim], self._repairs()
        moment = self.random.uniform(0.0, self.duration)
        with self.dump() as command:
            began = time.monotonic()
            targets = self.find(victim, command)
            time.sleep(max(0.0, moment - (time.monotonic() - began)))
            hit = self._strike(victim, targets)
            if victim in ("agent", "criu", "guard") or not hit:
                command.communicate(timeout=SETTLE)
            else:
                command.wait(SETTLE)
        tally.kills += hit
        tally.missed += not hit
        tally.inside += self._repairs() - repairs
        if (reason := self.outcome()) is not None:
            tally.ended.append(reason)
            self.session = self._start()

    def find(self, victim: str, command: subprocess.Popen[bytes]) -> list[psutil.Process]:
        if victim == "command":
            return [psutil.Process(command.pid)]
        if victim == "fork":
            return fork_server.forks(self.host) or [psutil.Process(command.pid)]
        if victim == "agent":
            agent = self.host.agent_pid()
            return [psutil.Process(agent)] if agent is not None else []
        if victim == "criu":
            return criu_of(self.log)
        if victim == "guard":
            return [one for one in psutil.process_iter(["cmdline"]) if self._is_guard(one)]
        return []

    def _is_guard(self, one: psutil.Process) -> bool:
        words = one.info["cmdline"] or []
        return any("criu.guard.process" in word for word in words) and self.host.group(self.session.session) in words

    def _strike(self, victim: str, targets: list[psutil.Process]) -> bool:
        if victim == "unit":  # as a service manager ends everything that a unit has started
            found = bool(cgroup.pids(self.unit))
            Path(self.unit, "cgroup.kill").write_text("1", encoding="ascii")
            return found
        hit = False
        for one in targets:
            with contextlib.suppress(psutil.NoSuchProcess):
                hit = hit or one.status() != psutil.STATUS_ZOMBIE
                one.send_signal(signal.SIGKILL)
        return hit

    def outcome(self) -> str | None:
        """None when the session counts on, its memory sound; else why it has ended."""
        before = self._printed()
        end = time.monotonic() + bound(SETTLE)
        while True:
            record = self.records.load(self.session.session)
            if record is None or record.phase != "live":
                return record.exit.reason if record and record.exit else f"phase {record and record.phase}"
            if self._printed() > before + 60:  # some five lines
                break
            assert time.monotonic() < end, f"{self.session.name} neither counts nor ends"
            time.sleep(0.02)
        return None

    def _printed(self) -> int:
        try:
            return talk.output(self.records, self.session.session, None).end
        except Exception:  # its holder may just be ending; the record tells
            return -1

    def check(self) -> None:
        """All numbers are there, memory was sound at each; it is parked and comes back."""
        self.session.assert_runs()
        self.host.cm_json("checkpoint", self.session.name)
        self.session.restore()

    def rows(self) -> list[tuple[str, ...]]:
        rows = [("victim", "kills", "too late", "inside", "sessions ended", "reasons")]
        for victim, tally in self.tallies.items():
            reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(tally.ended).items()) or "-"
            counts = (tally.kills, tally.missed, tally.inside, len(tally.ended))
            rows.append((victim, *map(str, counts), reasons))
        return rows


def criu_of(log: Path) -> list[psutil.Process]:
    """Return the CRIU that writes this log. It renames itself when it has read its request."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            words = Path(f"/proc/{one.pid}/cmdline").read_bytes()
            if (b"swrk" in words or b"--rpc" in words) and str(log) in open_files(one.pid):
                found.append(one)
    return found


def run(host: Host, seed: int, kills: int, seconds: float, victims: tuple[str, ...] = VICTIMS) -> Campaign:
    """Kill as often as `kills` says, or as there are seconds for."""
    campaign = Campaign(host, seed)
    end = time.monotonic() + seconds
    try:
        for number in range(kills):
            if time.monotonic() > end:
                break
            campaign.kill(victims[number % len(victims)])
        campaign.check()
    finally:
        campaign.close()
    return campaign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--victims", default=",".join(VICTIMS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="random-kills.") as directory, a_host(Path(directory), ready=True) as host:
        began = time.monotonic()
        done = run(host, given.seed, given.kills, given.seconds, tuple(given.victims.split(",")))
        title = f"seed {given.seed}, a dump takes {done.duration:.3f} s, {time.monotonic() - began:.0f} s in all"
        show(title, done.rows(), lambda line: print(line, file=sys.stdout, flush=True))


if __name__ == "__main__":
    main()
