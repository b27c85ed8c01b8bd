"""Workers on simulated hosts fight for leases while they are stopped, killed and cut off; what they believed is then
laid side by side (tests/support/lease_history.py): never two at once, tokens grow, nothing accepted from a superseded one.

Longer: CMDOP_MIGRATE_HISTORY_SECONDS=300 (for each backend). Another course: CMDOP_MIGRATE_HISTORY_SEED=7.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cmdop_migrate.lease.margins import RHO
from cmdop_migrate.lease.registry import open_lease
from tests.support.etcd_server import etcd
from tests.support.faulty_proxy import Proxy
from tests.support.lease_history import Event, read_events, violations
from tests.support.network_hosts import NetHost, Way
from tests.support.servers import seaweed

SECONDS = float(os.environ.get("CMDOP_MIGRATE_HISTORY_SECONDS", "14"))
SEED = int(os.environ.get("CMDOP_MIGRATE_HISTORY_SEED", "1"))
HOSTS, WORKERS = 3, 2  # workers on each host
SESSIONS = ["s1", "s2", "s-unwatched"]
WAYS: tuple[Way, ...] = ("input", "output", "both")


Place = tuple[list[NetHost], list[str], dict[str, str]]


@dataclass
class Runner:
    """The process of one worker; started anew after it was killed, with what it left on disk."""

    name: str
    command: list[str]
    dir: Path
    environ: dict[str, str]
    seed: int
    lives: int = 0
    stopped_until: float = 0.0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, url: str) -> None:
        self.lives += 1
        file, state = self.dir / f"{self.name}-{self.lives}.events", self.dir / f"{self.name}.state"
        arguments = [url, self.name, str(self.seed + self.lives * 1000), str(file), str(state), *SESSIONS]
        with (self.dir / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, sys.executable, "-m", "tests.support.lease_worker", *arguments],
                cwd=Path(__file__).parents[2],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(timeout=10)


@contextlib.contextmanager
def place(kind: str, tmp: Path, stack: contextlib.ExitStack) -> Iterator[Place]:
    """(hosts, the address each of them uses, environment). Servers listen on loopback; a relay for each host brings
    its connections there."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp)}
    if kind == "sqlite":
        yield [], [f"sqlite://{tmp}/lease.db"] * HOSTS, environ
        return
    hosts = [stack.enter_context(NetHost("10.213.77.", number)) for number in range(HOSTS)]
    if kind == "s3":
        server = stack.enter_context(seaweed(tmp))
        environ |= server.environ()
        with pytest.MonkeyPatch.context() as patch:
            for key, value in server.environ().items():
                patch.setenv(key, value)
            bucket = server.new_bucket()
            open_lease(server.url(bucket, "p")).check()
        relays = [stack.enter_context(Proxy(server.port, host.gateway)) for host in hosts]
        yield hosts, [server.url(bucket, "p", relay.endpoint) for relay in relays], environ
        return
    cluster = stack.enter_context(etcd(tmp / "etcd", members=3 if kind == "etcd-three" else 1))
    urls = []
    for host in hosts:
        ports = [stack.enter_context(Proxy(one.client_port, host.gateway)).port for one in cluster.members]
        urls.append(f"etcd://{','.join(f'{host.gateway}:{port}' for port in ports)}/p")
    yield hosts, urls, environ


def torment(
    runners: list[Runner], urls: list[str], hosts: list[NetHost], dice: random.Random, enough: Callable[[], bool]
) -> dict[str, int]:
    """Until the time is up, every now and then: stop one for a while, kill one, cut a host off, put things right. On
    a busy machine little happens in that time: continue until it is `enough`, at most three times as long."""
    done = dict.fromkeys(("stop", "kill", "cut"), 0)
    healed: dict[int, float] = {}
    end, last = time.monotonic() + SECONDS, time.monotonic() + SECONDS * 3
    while (now := time.monotonic()) < end or (now < last and not enough()):
        for number, until in list(healed.items()):
            if until < now:
                hosts[number].heal()
                del healed[number]
        for at, one in enumerate(runners):
            if one.stopped_until and one.stopped_until < now:
                one.stopped_until = 0.0
                one.signal(signal.SIGCONT)
            assert one.process is not None
            if one.process.poll() not in (None, -signal.SIGKILL):
                raise AssertionError(f"{one.name} died: {(one.dir / f'{one.name}.log').read_text()[-2000:]}")
            if one.process.poll() is not None:
                one.start(urls[at // WORKERS])
        luck, victim = dice.random(), dice.choice(runners)
        if luck < 0.3 and not victim.stopped_until:
            victim.signal(signal.SIGSTOP)
            victim.stopped_until = now + dice.uniform(0.05, 2.5)
            done["stop"] += 1
        elif luck < 0.4 and not victim.stopped_until:
            victim.end()
            done["kill"] += 1
        elif luck < 0.6 and hosts:
            number = dice.randrange(len(hosts))
            hosts[number].cut(dice.choice(WAYS))
            healed[number] = now + dice.uniform(0.1, 2.5)
            done["cut"] += 1
        time.sleep(dice.uniform(0.05, 0.25))
    return done


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 5 + 120)
@pytest.mark.parametrize("kind", ["sqlite", "s3", "etcd-one", "etcd-three"])
def test_no_lease_has_two_holders_while_workers_and_links_fail(kind: str, tmp_path: Path) -> None:
    if kind != "sqlite" and os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    dice = random.Random(f"{SEED}-{kind}")
    events_dir = tmp_path / "events"
    events_dir.mkdir()

    def is_enough() -> bool:
        so_far = read_events(events_dir.glob("*.events"))
        return _is_at_stake(so_far) and (not kind.startswith("etcd") or _etcd_told(so_far))

    with contextlib.ExitStack() as stack, place(kind, tmp_path, stack) as (hosts, urls, environ):
        runners = [
            Runner(
                f"h{at}w{worker}", hosts[at].enter if hosts else [], events_dir, environ, SEED * 100 + at * 10 + worker
            )
            for at in range(HOSTS)
            for worker in range(WORKERS)
        ]
        try:
            for at, one in enumerate(runners):
                one.start(urls[at // WORKERS])
            done = torment(runners, urls, hosts, dice, is_enough)
        finally:
            for one in runners:
                one.end()
    events = read_events(sorted(events_dir.glob("*.events")))
    steps = sum(int(file.read_text() or 0) for file in events_dir.glob("*.steps"))
    print(_told(kind, events, steps, done))
    assert violations(events) == []
    assert violations(events, drift=RHO) == [], "and on clocks that differ as far as they may"
    assert _is_at_stake(events), "too little was at stake"
    assert done["stop"] and done["kill"] and (done["cut"] or not hosts)
    if kind.startswith("etcd"):
        assert _etcd_told(events), "etcd itself tells"


def _is_at_stake(events: list[Event]) -> bool:
    holders = {one.worker for one in events if one.what == "held"}
    return len({(one.session, one.token) for one in events}) > 10 and len(holders) > HOSTS


def _etcd_told(events: list[Event]) -> bool:
    return len({one.token for one in events if one.session == "s-unwatched"}) > 1


def _told(kind: str, events: list[Event], steps: int, done: dict[str, int]) -> str:
    counts = {what: sum(one.what == what for one in events) for what in ("held", "renewed", "stopped", "wrote")}
    return f"history {kind}: {steps} steps, {len(events)} events {counts}, torments {done}"
