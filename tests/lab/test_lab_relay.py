"""A person types, from a machine that reaches the relay and no host, while the session goes to and fro between two hosts.

CMDOP_TEST_MOVES says how often, 5 unless told; the project's figures are of 50.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import typing_client
from tests.support.host import PROJECT, until
from tests.support.lab_hosts import LabHost, TestLab, a_lab

MOVES = int(os.environ.get("CMDOP_TEST_MOVES", "5"))
CREDENTIAL = "/root/relay.credential"


class LabRelay:
    """`cmdop-migrate relay serve` on a machine of the lab."""

    def __init__(self, at: LabHost) -> None:
        self._at = at
        self.url = f"wss://{at.address}:7443"
        self.facts: dict[str, Any] = {}

    def start(self) -> None:
        argv = self._at.argv("relay", "serve", "--json", "--listen", f"{self._at.address}:7443")
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.facts = json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        """The relay itself: what we started is only its way into the lab."""
        for pid in self._at.processes():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as words:
                if b"\0relay\0serve\0" in words.read():
                    os.kill(pid, signal.SIGKILL)
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Client:
    """tests/support/typing_client.py on another machine."""

    def __init__(self, at: LabHost, session: str) -> None:
        words = [
            "env",
            f"PYTHONPATH={PROJECT}",
            sys.executable,
            "-m",
            "tests.support.typing_client",
            CREDENTIAL,
            session,
        ]
        self._process = subprocess.Popen(
            at.lab.command(at.name, words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == {"ready": True}

    def ask(self, order: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the client ended with {self._process.wait(10)}"
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def lab() -> Iterator[tuple[TestLab, LabRelay]]:
    with a_lab(hosts=4, lease="etcd", ttl="3s") as made:
        a, b, c, d = made.hosts
        relay = LabRelay(c)
        relay.start()
        try:
            pin = ("--pin", relay.facts["pin"])
            for host in (a, b):
                host.shell(f"sed -i '1i relay = \"{relay.url}\"' /etc/cmdop-migrate/config.toml")
                out = ("--out", "/var/lib/cmdop-migrate/relay.credential")
                host.ok("relay", "token", "create", "--host", host.name, *pin, *out)
            words = ("--actor", "ann", "--role", "execute", "--session", "*", "--relay", relay.url)
            text = a.cm_json("relay", "token", "create", *words, *pin)["credential"]
            d.shell(f"umask 077; echo {text} > {CREDENTIAL}")
            yield made, relay
        finally:
            relay.kill()


def start(lab: TestLab, name: str) -> tuple[str, Client]:
    a, d = lab.host("host-a"), lab.host("host-d")
    session = typing_client.start(a, name)
    seen = ("--credential", CREDENTIAL, "--json")
    until(lambda: any(one["routed"] for one in json.loads(d.ok("ls", *seen))["sessions"]), 20, "the relay has it")
    return session, Client(d, session)


def moves(lab: TestLab, name: str, client: Client, count: int) -> list[tuple[float, float]]:
    """Of each move: how long nothing came to the client, and how long the session itself was frozen."""
    pauses = []
    for number in range(count):
        here, there = ("host-a", "host-b") if number % 2 == 0 else ("host-b", "host-a")
        facts = lab.host(here).cm_json("migrate", name, "--to", there, timeout=120)
        pauses.append((client.ask("next")["pause"], facts["frozen_s"] or 0.0))
    return pauses


def said(title: str, pauses: list[tuple[float, float]], facts: dict[str, Any]) -> None:
    words = []
    for what, times in zip(("pause at the client", "session frozen"), zip(*pauses, strict=True), strict=True):
        at = [sorted(times)[min(len(times) - 1, int(len(times) * part))] for part in (0.5, 0.99)]
        words.append(f"{what} p50 {at[0]:.2f} s, p99 {at[1]:.2f} s")
    print(f"\n{title}: {len(pauses)} moves; {'; '.join(words)}; {facts}")


@pytest.mark.timeout(120 + 30 * MOVES)
def test_every_byte_once_and_in_order(lab: tuple[TestLab, LabRelay]) -> None:
    made, _ = lab
    _, client = start(made, "w")
    try:
        pauses = moves(made, "w", client, MOVES)
        facts = client.ask("stop")
    finally:
        client.close()
    said("undisturbed", pauses, facts)
    assert facts["typed"] == facts["applied"] > 0
    assert not {"lost", "undone", "refused"} & facts["told"].keys(), facts
    assert facts["told"]["moving"] >= MOVES


@pytest.mark.timeout(120 + 60 * MOVES)
def test_while_relays_die_and_the_clients_cable_is_cut(lab: tuple[TestLab, LabRelay]) -> None:
    made, relay = lab
    _, client = start(made, "x")
    over, dice, done = threading.Event(), random.Random(7), {"killed": 0, "cut": 0}

    def trouble() -> None:
        while not over.wait(dice.uniform(0.5, 2.0)):
            if dice.random() < 0.5:
                relay.kill()
                relay.start()
                done["killed"] += 1
            else:
                made.cut("host-d")
                over.wait(dice.uniform(0.2, 1.0))
                made.heal("host-d")
                done["cut"] += 1

    thread = threading.Thread(target=trouble)
    thread.start()
    try:
        pauses = moves(made, "x", client, max(2, MOVES // 2))
        over.set()
        thread.join(30)
        facts = client.ask("stop")
    finally:
        over.set()
        thread.join(30)
        client.close()
    said(f"with {done}", pauses, facts)
    assert facts["typed"] == facts["applied"] > 0 and done["killed"] and done["cut"]
    assert not {"lost", "undone", "refused"} & facts["told"].keys(), facts
