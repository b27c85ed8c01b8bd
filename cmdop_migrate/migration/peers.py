"""Other hosts, ready to be driven: known, reached, of this version, with the same store, lease store and key."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Whose .ssh is used."""
    return Path(os.path.expanduser("~"))


def inventory(config: Config) -> Inventory:
    return Inventory(config.state_dir, config.hosts, home())


def known_hosts(config: Config) -> KnownHosts:
    return KnownHosts(config.state_dir / "known_hosts", home())


def forget_key(config: Config, target: SshTarget) -> None:
    """Unless another known host is at the same address: it is its key too."""
    if all(one.known_as != target.known_as for one in inventory(config).all()):
        known_hosts(config).forget(target.known_as)


@contextmanager
def pool(config: Config, limits: SshLimits | None = None) -> Iterator[SshPool]:
    """Connections for one command; all are closed at its end."""
    made = SshPool(known_hosts(config), home(), limits)
    try:
        yield made
    finally:
        made.close()


def partner(this_host: Host, connections: SshPool, name: str) -> Peer:
    """The host `name`, checked: a session sealed here can be restored there.

    HostNotFound, PeerFailed (not reached, nothing started), PeerDiffers (version, store, lease store, key), Usage (it
    is this host), or what the far side says is wrong with itself.
    """
    peer = Peer(inventory(this_host.config).find(name), connections)
    compatibility.check(name, own_facts(this_host), peer.hello())
    return peer


def own_facts(this_host: Host) -> dict[str, Any]:
    resources.open_keys(this_host.config)  # who is to hand something over has a key to seal it with
    return compatibility.facts(this_host.config, this_host, places=True)


def examine(this_host: Host, connections: SshPool, name: str) -> dict[str, Any]:
    """What `hosts check` answers: reached, understood, alike, and fit to hold sessions."""
    peer = Peer(inventory(this_host.config).find(name), connections)
    ours = own_facts(this_host)
    began = time.monotonic()
    connections.transport(peer.target)
    connected = time.monotonic()
    with _its_failures():
        theirs = peer.hello()
    greeted = time.monotonic()
    compatibility.check(name, ours, theirs)
    with _its_failures():
        doctor = peer.call("doctor", timeout=120)
    return {
        "ok": bool(doctor.get("ok")),
        "name": name,
        "address": peer.target.shown,
        "host": theirs["host"],
        "host_id": theirs["host_id"],
        "version": theirs["version"],
        "protocol": theirs["protocol"],
        "connect_s": round(connected - began, 3),
        "answer_s": round(greeted - connected, 3),
        "checks": [one for one in doctor.get("checks", []) if one.get("level") != "ok"],
    }


@contextmanager
def _its_failures() -> Iterator[None]:
    """To who checks a host, whatever fails there is that host's failure."""
    try:
        yield
    except PeerFailed:
        raise
    except CmdopError as error:
        raise PeerFailed(error.message, error.hint) from error
