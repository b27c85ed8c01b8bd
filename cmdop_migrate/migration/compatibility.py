"""Check what two hosts must share before a session can move between them: store, lease store and key."""

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
    """Return what `version --json` prints. Without `this_host` (not root) the fields that need root are empty. The ids
    of store and lease store, which need a request to each, are included only with `places`."""
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
    """Return the id of a store, which does not depend on its address. The id is an object in the store, written on the
    first call by any host."""
    try:
        return store.get(STORE_ID, 0, 64).decode("ascii", "replace")
    except KeyError:
        store.put_new(STORE_ID, os.urandom(12).hex().encode())
    return store.get(STORE_ID, 0, 64).decode("ascii", "replace")


def check(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raise PeerDiffers if a session sealed here could not be restored on host `name`, Usage if that is this host.
    Pure."""
    if ours["host_id"] == theirs["host_id"]:
        raise Usage(f"{name} is this host itself", "Name another one; see: cmdop-migrate hosts ls")
    for word, what in (("store", "store"), ("lease", "lease store")):
        mine, its = ours[word], theirs[word]
        if mine["id"] == its["id"]:
            continue
        local = mine["url"] == its["url"]
        raise PeerDiffers(
            f"{name} has another {what}: {its['url']}" + ("" if local else f", this host {mine['url']}"),
            f"This address is local to each machine: set `{word}` to one that both hosts reach."
            if local
            else f"Set `{word}` to the same value on both hosts; see docs/operations/hosts.md.",
        )
    current = ours["keys"][0]
    if current not in theirs["keys"]:
        raise PeerDiffers(
            f"{name} does not have the key {current[:16]} that seals this host's checkpoints",
            f"cmdop-migrate key export | ssh {name} cmdop-migrate key import",
        )


def _fingerprints(config: Config) -> list[str]:
    """Return the fingerprints of this host's keys, the current one first. No key is created."""
    if not config.key_file.exists():
        return []
    return [key.fingerprint for key in keys.load(config.key_file).keys]
