"""What two hosts must have in common before a session can go from one to the other."""

from __future__ import annotations

import os
from typing import Any

from cmdop_migrate import __version__
from cmdop_migrate.config import Config
from cmdop_migrate.errors import PeerDiffers, Usage
from cmdop_migrate.host import leases, resources
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.format import keys
from cmdop_migrate.images.format.layout import STORE_ID
from cmdop_migrate.lease.store_id import identity
from cmdop_migrate.model import PROTOCOL
from cmdop_migrate.storage.base import Store


def facts(config: Config, this_host: Host | None, places: bool) -> dict[str, Any]:
    """What `version` answers. Without `this_host` (not root) what only root may know is left out; the ids of store and
    lease store, which must be asked for them, only with `places`."""
    asked = places and this_host is not None
    return {
        "version": __version__,
        "protocol": PROTOCOL,
        "host": config.host,
        "host_id": this_host.host_id() if this_host else None,
        "store": {"url": config.store, "id": store_identity(resources.open_store(config)) if asked else None},
        "lease": {"url": config.lease, "id": identity(leases.open_store(config)) if asked else None},
        "keys": _fingerprints(config) if this_host else [],
    }


def store_identity(store: Store) -> str:
    """Which store this is, whatever address it has: an object of its own, written once by whoever asks first."""
    try:
        return store.get(STORE_ID, 0, 64).decode("ascii", "replace")
    except KeyError:
        store.put_new(STORE_ID, os.urandom(12).hex().encode())
    return store.get(STORE_ID, 0, 64).decode("ascii", "replace")


def check(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """PeerDiffers when a session sealed here could not be restored at `name`, Usage when it is this very host. Pure."""
    if ours["host_id"] == theirs["host_id"]:
        raise Usage(f"{name} is this host itself", "Name another one; see: cmdop-migrate hosts ls")
    for word, what in (("store", "store"), ("lease", "lease store")):
        mine, its = ours[word], theirs[word]
        if mine["id"] == its["id"]:
            continue
        local = mine["url"] == its["url"]
        raise PeerDiffers(
            f"{name} has another {what}: {its['url']}" + ("" if local else f", this host {mine['url']}"),
            f"This address means another place on each machine: set `{word}` to one both reach, on both hosts."
            if local
            else f"Set `{word}` alike on both hosts; see docs/operations/hosts.md.",
        )
    current = ours["keys"][0]
    if current not in theirs["keys"]:
        raise PeerDiffers(
            f"{name} does not have the key {current[:16]} that seals this host's checkpoints",
            f"cmdop-migrate key export | ssh {name} cmdop-migrate key import",
        )


def _fingerprints(config: Config) -> list[str]:
    """The current key's first. None is made for being asked."""
    if not config.key_file.exists():
        return []
    return [one.fingerprint for one in keys.load(config.key_file).keys]
