"""The second half of the demo: two hosts of their own on this machine, and a session that moves between them.

Each host has its own namespaces, disks and sshd; beside them run a real S3 server and etcd (scripts/lab).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from demo_place import Trouble
from demo_say import Say

from scripts.lablib import lab as labs
from scripts.lablib import place as lab_places
from scripts.lablib.lab import Lab
from scripts.lablib.model import LabSpec, LabTrouble

NAME = "work"
FROM, TO = "host-a", "host-b"
# A development server that keeps its state in memory: how often it was asked.
SERVER = (
    "import http.server as h; n = [0]; "
    "H = type('H', (h.BaseHTTPRequestHandler,), {'do_GET': lambda s: (n.append(1), s.send_response(200), "
    "s.end_headers(), s.wfile.write(b'visit %d' % (len(n) - 1))), 'log_message': lambda s, *a: None}); "
    "h.HTTPServer(('', 8000), H).serve_forever()"
)
COMMAND = f'python3 -c "{SERVER}" & while :; do echo $((++i)); sleep .1; done'
ASK = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())"


@dataclass
class Move:
    """What the steps share."""

    lab: Lab
    say: Say
    visits: int = 0
    timings: list[tuple[str, float]] = field(default_factory=list)

    def on(self, host: str, *arguments: str, shown: str = "") -> Any:
        """What the command answers on that host. Trouble when it fails."""
        self.say.command(f"cmdop-migrate {shown or ' '.join(arguments)}", prompt=f"{host}$ ")
        return self.ask(host, *arguments)

    def ask(self, host: str, *arguments: str) -> Any:
        done = self.lab.exec(host, "cmdop-migrate", "--json", *arguments, timeout=90)
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            raise Trouble(f"{arguments[0]} said no JSON: {done.stdout[-200:]}{done.stderr[-500:]}") from None
        if "error" in answer:
            raise Trouble(f"{arguments[0]}: {answer['error']['message']}. {answer['error']['hint']}")
        return answer

    def numbers(self, host: str) -> list[int]:
        """All it ever counted, as the host that has it now knows: its memory of what was printed moves along."""
        return [int(word) for word in self.ask(host, "output", NAME, "--from", "0")["data"].split()]

    def visit(self, host: str) -> None:
        """The server answers, and remembers."""
        address = self.ask(host, "show", NAME)["address"]
        done = self.lab.exec(host, "python3", "-c", ASK, f"http://{address}:8000/")
        self.visits += 1
        if done.stdout.strip() != f"visit {self.visits}":
            raise Trouble(f"the server answered {done.stdout.strip()!r}, not visit {self.visits}. {done.stderr[-300:]}")
        self.say.result(f"its development server, asked from {host}: {done.stdout.strip()}")

    def goes_on(self, host: str, after: int) -> int:
        """Until it has counted a few numbers past `after`; -> how far it is."""
        until = time.monotonic() + 20
        while (numbers := self.numbers(host))[-1:] < [after + 5]:
            if time.monotonic() > until:
                raise Trouble(f"it does not count on at {host}")
            time.sleep(0.2)
        if numbers != list(range(1, len(numbers) + 1)):
            raise Trouble("a number is missing or doubled")
        self.say.result(f"it counts on from {after + 1}, now at {numbers[-1]}: none missing, none doubled.")
        return numbers[-1]


def start(move: Move) -> None:
    """On host-a: a development server and a counting shell"""
    began = time.monotonic()
    move.on(FROM, "run", "-d", "--name", NAME, "--", "bash", "-c", COMMAND, shown=f"run -d --name {NAME} -- bash -c …")
    move.timings.append(("session started on host-a", time.monotonic() - began))
    until = time.monotonic() + 20
    while not move.ask(FROM, "show", NAME)["sockets"] or not move.numbers(FROM):
        if time.monotonic() > until:
            raise Trouble("the server does not come up")
        time.sleep(0.1)
    move.visit(FROM)


def park(move: Move) -> None:
    """Checkpoint it: sealed, in the S3 store"""
    parked = move.on(FROM, "checkpoint", NAME)
    move.timings.append(("checkpoint: frozen", parked["frozen_s"]))
    kib = parked["bytes"]["new"] / 1024
    move.say.result(f"parked as {parked['checkpoint'][:12]}: {kib:.0f} KiB; no process of it is left on {FROM}.")


def elsewhere(move: Move) -> None:
    """Restore it on the other host"""
    before, began = move.numbers(FROM)[-1], time.monotonic()
    restored = move.on(FROM, "restore", NAME, "--to", TO)
    move.timings.append(("restore --to host-b, in all", time.monotonic() - began))
    if restored["host"] != TO or restored["token"] != 2:
        raise Trouble(f"it runs on {restored['host']} as incarnation {restored['token']}")
    move.say.result(f"running on {restored['host']}: incarnation {restored['token']}")
    move.goes_on(TO, before)
    move.visit(TO)


def drain(move: Move) -> None:
    """host-b goes down for maintenance: drain it"""
    before, began = move.numbers(TO)[-1], time.monotonic()
    drained = move.on(TO, "drain", "--to", FROM)
    move.timings.append(("drain of host-b, in all", time.monotonic() - began))
    if len(drained["moved"]) != 1 or drained["left"] or drained["failed"]:
        raise Trouble(f"drain left something behind: {drained}")
    if [one for one in move.ask(TO, "ls")["sessions"] if one["state"] not in ("exited", "parked")]:
        raise Trouble(f"something still runs on {TO}")
    move.say.result(f"{TO} is empty.")
    move.goes_on(FROM, before)
    move.visit(FROM)


def figures(move: Move) -> None:
    """What took how long"""
    move.ask(FROM, "kill", NAME)
    for what, took in move.timings:
        move.say.row(what, f"{took:.2f} s")


STEPS: list[Callable[[Move], None]] = [start, park, elsewhere, drain, figures]


def play(say: Say, first: int) -> None:
    """All of it, the steps numbered from `first`. Trouble when something does not hold; the lab is gone either way."""
    say.title(f"Two hosts, {FROM} and {TO}, with an S3 server and etcd beside them")
    with _hosts(say) as lab:
        move = Move(lab, say)
        for index, step in enumerate(STEPS, first):
            say.step(index, step.__doc__ or step.__name__)
            step(move)


@contextmanager
def _hosts(say: Say) -> Iterator[Lab]:
    began = time.monotonic()
    try:
        lab = labs.up(LabSpec(f"demo-{os.getpid()}", 2, owner=lab_places.owner_of(os.getpid())))
    except LabTrouble as trouble:
        raise Trouble(str(trouble)) from None
    try:
        say.result(f"up in {time.monotonic() - began:.1f} s")
        yield lab
    finally:
        lab.down()
