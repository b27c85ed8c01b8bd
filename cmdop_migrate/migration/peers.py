"""Connect to other hosts and check that sessions can move there: same version, store, lease store and key."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cmdop_migrate.config import Config
from cmdop_migrate.errors import CmdopError, PeerFailed
from cmdop_migrate.host import resources
from cmdop_migrate.host.host import Host
from cmdop_migrate.migration import compatibility
from cmdop_migrate.remote.connect import SshLimits
from cmdop_migrate.remote.inventory import Inventory, SshTarget
from cmdop_migrate.remote.knownhosts import KnownHosts
from cmdop_migrate.remote.peer import Peer
from cmdop_migrate.remote.ssh import SshPool


def home() -> Path:
    """Return the home directory whose .ssh is used."""
    return Path(os.path.expanduser("~"))


def inventory(config: Config) -> Inventory:
    """Return the inventory of known hosts."""
    return Inventory(config.state_dir, config.hosts, home())


def known_hosts(config: Config) -> KnownHosts:
    """Return the SSH host keys this host knows."""
    return KnownHosts(config.state_dir / "known_hosts", home())


def forget_key(config: Config, target: SshTarget) -> None:
    """Forget the SSH host key of a host, unless another known host has the same address and therefore the same key."""
    if all(host.known_as != target.known_as for host in inventory(config).all()):
        known_hosts(config).forget(target.known_as)


@contextmanager
def pool(config: Config, limits: SshLimits | None = None) -> Iterator[SshPool]:
    """Yield a pool of connections for one command, and close all of them at the end."""
    connections = SshPool(known_hosts(config), home(), limits)
    try:
        yield connections
    finally:
        connections.close()


def checked_peer(this_host: Host, connections: SshPool, name: str) -> Peer:
    """Return the host `name`, after checking that a session sealed here can be restored there.

    Raises HostNotFound, PeerFailed (not reached, nothing started), PeerDiffers (version, store, lease store, key),
    Usage (it is this host), or the error that the other host reports of itself.
    """
    peer = Peer(inventory(this_host.config).find(name), connections)
    compatibility.check(name, own_facts(this_host), peer.hello())
    return peer


def own_facts(this_host: Host) -> dict[str, Any]:
    """Return the facts of this host that `compatibility.check` compares. Creates this host's key if it has
    no key yet."""
    resources.open_keys(this_host.config)
    return compatibility.facts(this_host.config, this_host, places=True)


@dataclass(frozen=True)
class HostCheck:
    """Describe a host that was reached and shares store, lease store and key. The fields are those of
    `hosts check --json`."""

    ok: bool  # whether its own doctor found nothing wrong
    name: str
    address: str
    host: str
    host_id: str
    version: str
    protocol: int
    connect_s: float
    answer_s: float
    checks: list[dict[str, Any]]  # what its doctor found

    def to_json(self) -> dict[str, Any]:
        """Return what `hosts check --json` prints."""
        return asdict(self)


def check_host(this_host: Host, connections: SshPool, name: str) -> HostCheck:
    """Connect to a host, and check that it shares store, lease store and key, and can hold sessions. Raises the errors
    of `checked_peer`; any failure on the other host is PeerFailed."""
    peer = Peer(inventory(this_host.config).find(name), connections)
    ours = own_facts(this_host)
    began = time.monotonic()
    connections.transport(peer.target)
    connected = time.monotonic()
    with _as_peer_failure():
        theirs = peer.hello()
    greeted = time.monotonic()
    compatibility.check(name, ours, theirs)
    with _as_peer_failure():
        doctor = peer.call("doctor", timeout=120)
    return HostCheck(
        ok=bool(doctor.get("ok")),
        name=name,
        address=peer.target.shown,
        host=theirs["host"],
        host_id=theirs["host_id"],
        version=theirs["version"],
        protocol=theirs["protocol"],
        connect_s=round(connected - began, 3),
        answer_s=round(greeted - connected, 3),
        checks=[check for check in doctor.get("checks", []) if check.get("level") != "ok"],
    )


@contextmanager
def _as_peer_failure() -> Iterator[None]:
    """Turn any error of the other host into PeerFailed."""
    try:
        yield
    except PeerFailed:
        raise
    except CmdopError as error:
        raise PeerFailed(error.message, error.hint) from error
