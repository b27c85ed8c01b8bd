"""Simulate two hosts on one machine, the second one driven over a real sshd on loopback.

with two(tmp_path) as world:
    world.a.cm_json("migrate", "w", "--to", "host-b")
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmdop_migrate.util.faults import TEST_STOP
from tests.support.host import CM, Host, pair
from tests.support.sshd import Login, Sshd, an_sshd, new_key


@dataclass(frozen=True)
class World:
    a: Host
    b: Host
    sshd: Sshd
    dir: Path

    def clear(self) -> None:
        """End all sessions, so that the next test finds both hosts empty."""
        for host in (self.a, self.b):
            for row in host.sessions():
                host.cm("kill", row["session"], "--signal", "KILL")

    @property
    def ssh_options(self) -> str:
        """Return options for `ssh` itself."""
        return f"-i {self.dir}/login -o UserKnownHostsFile={self.a.state}/known_hosts -o StrictHostKeyChecking=yes"

    def set_there(self, **environ: str) -> None:
        """Set the environment of commands that run on host-b over SSH from now on."""
        _wrapper(self.b, self.dir / "cm-b", environ)

    def stop_there(self, session: str, step: str) -> None:
        """Let a restore of this session over SSH stop at `step`."""
        (self.dir / "stops" / session).write_text(f"restore:{step}")

    def where(self, session: str) -> list[str]:
        """Return the hosts on which the session has processes."""
        return [host.name for host in (self.a, self.b) if host.pids(session)]

    def resume(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.a.cm_json("resume")["migrations"]
        return found


def _wrapper(host: Host, path: Path, more: dict[str, str]) -> None:
    environ = {
        key: value
        for key, value in host.env(**more).items()
        if key.startswith(("CMDOP_", "AWS_", "PYTHONPATH", "LANG"))
    }
    words = " ".join(f"{key}={shlex.quote(value)}" for key, value in environ.items())
    stops = path.with_name("stops")
    stops.mkdir(exist_ok=True)
    # `--json restore SESSION …`: where a test wants that to stop
    stop = f'[ -f "{stops}/$3" ] && export {TEST_STOP}="$(cat "{stops}/$3")"'
    path.write_text(f'#!/bin/sh\n{stop}\nexec env {words} {shlex.join(CM)} "$@"\n')
    path.chmod(0o755)


@contextlib.contextmanager
def two(directory: Path, ttl: str = "3s", environ: dict[str, str] | None = None) -> Iterator[World]:
    """Yield two hosts; `environ` holds settings for both, such as another store."""
    home = directory / "home"
    home.mkdir()
    login: Login = new_key(directory / "login")
    many = "MaxStartups 100\nMaxSessions 100"
    with pair(directory, ttl=ttl) as (a, b), an_sshd(directory / "sshd", login, options=many) as sshd:
        a.extra |= environ or {}
        b.extra |= environ or {}
        a.extra["HOME"] = str(home)
        world = World(a, b, sshd, directory)
        world.set_there()
        key, command = str(login.private), str(directory / "cm-b")
        a.ok("hosts", "add", "host-b", sshd.address, "--user", "root", "--key", key, "--command", command, "--yes")
        yield world
