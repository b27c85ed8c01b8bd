"""Simulate several hosts on one machine, each with its own sshd on loopback; each has the others in its list of hosts.

with several(tmp_path, "host-a", "host-b", "host-c") as world:
    world["host-a"].cm_json("drain", "--to", "host-b,host-c")
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.host import Host
from tests.support.host_pair import _wrapper
from tests.support.sshd import Sshd, an_sshd, new_key


@dataclass(frozen=True)
class World:
    hosts: dict[str, Host]
    sshds: dict[str, Sshd]
    dir: Path

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def set_there(self, name: str, **environ: str) -> None:
        """Set the environment of commands that run on that host over SSH from now on."""
        _wrapper(self.hosts[name], self.dir / f"cm-{name}", environ)

    def where(self, session: str) -> list[str]:
        """Return the hosts on which the session has processes."""
        return [host.name for host in self.hosts.values() if host.pids(session)]


@contextlib.contextmanager
def several(directory: Path, *names: str, ttl: str = "3s", **options: Any) -> Iterator[World]:
    shared = {
        "CMDOP_MIGRATE_STORE": f"file://{directory}/store",
        "CMDOP_MIGRATE_LEASE": f"sqlite://{directory}/lease/lease.db",
        "CMDOP_MIGRATE_KEY_FILE": f"{directory}/keys",
        "HOME": str(directory / "home"),
        "SSH_AUTH_SOCK": "",
    }
    (directory / "home").mkdir()
    login = new_key(directory / "login")
    with contextlib.ExitStack() as stack:
        world = World({}, {}, directory)
        for name in names:
            (directory / name).mkdir()
            host = Host(directory / name, name=name, ttl=ttl, extra=dict(shared), **options)
            stack.callback(host.close)
            world.hosts[name] = host
            world.sshds[name] = stack.enter_context(an_sshd(directory / f"sshd-{name}", login))
            world.set_there(name)
        for name, host in world.hosts.items():
            for other in names:
                if other != name:
                    _introduce(host, other, world.sshds[other], str(login.private), directory)
        yield world


def _introduce(host: Host, other: str, sshd: Sshd, key: str, directory: Path) -> None:
    command = str(directory / f"cm-{other}")
    host.ok("hosts", "add", other, sshd.address, "--user", "root", "--key", key, "--command", command, "--yes")
