"""Link hosts to a real relay, and run clients that reach it and nothing else.

with linked(tmp_path) as world:
    world.a.start(...); world.client("output", "w")
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmdop_migrate.gateway import client as gateway_client
from cmdop_migrate.gateway.relay_channel import RelayStream
from tests.support.host import CM, PROJECT, Host, until
from tests.support.host_pair import World, two
from tests.support.pty_client import Pty
from tests.support.relay_server import ARelay


@dataclass
class Linked:
    """Run two hosts that can hand sessions to each other, and a relay on another simulated machine."""

    world: World
    relay: ARelay
    dir: Path

    @property
    def a(self) -> Host:
        return self.world.a

    @property
    def b(self) -> Host:
        return self.world.b

    def credential(self, role: str = "execute", sessions: str = "*", actor: str = "alice", url: str = "") -> Path:
        """Write the credential file of a client, which has nothing else of the hosts."""
        file = self.dir / f"{actor}-{role}-{os.urandom(3).hex()}.credential"
        words = ("relay", "token", "create", "--actor", actor, "--role", role, "--session", sessions)
        self.a.ok(*words, "--relay", url or self.relay.url, "--pin", self.relay.facts["pin"], "--out", str(file))
        return file

    def argv(self, file: Path, *args: str) -> list[str]:
        return [*CM, args[0], *args[1:], "--credential", str(file)]

    def env(self) -> dict[str, str]:
        return client_env()

    def client(self, file: Path, *args: str, timeout: float = 60) -> subprocess.CompletedProcess[bytes]:
        """Return the command of a client that has a credential and no rights on any host."""
        return subprocess.run(
            self.argv(file, *args), env=self.env(), capture_output=True, timeout=timeout, check=False, cwd="/"
        )

    def client_json(self, file: Path, *args: str, **options: Any) -> dict[str, Any]:
        done = self.client(file, *args, "--json", **options)
        assert done.returncode == 0, f"{args}: exit {done.returncode}\n{done.stdout!r}\n{done.stderr.decode()}"
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def attach(self, file: Path, session: str, *options: str) -> Pty:
        return Pty(self.argv(file, "attach", session, *options), self.env())

    def line(self, file: Path, session: str) -> RelayStream:
        credential = gateway_client.load(file)
        assert credential.relay
        return RelayStream(credential.relay, credential, session)

    def move(self, name: str, there: bool) -> dict[str, Any]:
        """Move a session to the other host: host-a drives host-b over SSH; back it goes by way of the store."""
        if there:
            return self.a.cm_json("migrate", name, "--to", "host-b", timeout=120)
        self.b.ok("checkpoint", name, timeout=120)
        return self.a.cm_json("restore", name, timeout=120)

    def is_routed(self, session: str, file: Path) -> bool:
        rows = [one for one in self.client_json(file, "ls")["sessions"] if one["session"] == session]
        return bool(rows) and bool(rows[0]["routed"])

    def routed(self, session: str, file: Path) -> None:
        until(lambda: self.is_routed(session, file), 15, "the relay has it")

    def restart_relay(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.relay.stop(number)
        self.relay.start()


def client_env(**more: str) -> dict[str, str]:
    kept = {key: os.environ[key] for key in ("PATH",) if key in os.environ}
    return {**kept, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONPATH": str(PROJECT),
            "CMDOP_MIGRATE_CONFIG": os.devnull, **more}  # fmt: skip


@contextlib.contextmanager
def linked(directory: Path, ttl: str = "3s") -> Iterator[Linked]:
    with two(directory, ttl=ttl) as world:
        place = directory / "relay"
        place.mkdir()
        shared = {key: value for key, value in world.a.extra.items() if key.startswith("CMDOP_")}
        relay = ARelay(Host(place, name="host-r", subnet="100.64.0.0/24", extra=shared))
        world.a.ok("relay", "identity")
        relay.start()
        try:
            for host in (world.a, world.b):
                file = host.dir / "relay.credential"
                host.extra |= {"CMDOP_MIGRATE_RELAY": relay.url, "CMDOP_MIGRATE_RELAY_CREDENTIAL": str(file)}
                host.ok(
                    "relay", "token", "create", "--host", host.name, "--pin", relay.facts["pin"], "--out", str(file)
                )
            world.set_there()
            yield Linked(world, relay, directory)
        finally:
            relay.stop()
