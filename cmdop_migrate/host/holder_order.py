"""Build the order that a holder process is started with, for a new session or a restored one."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from cmdop_migrate.config import Config
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host.host import Host
from cmdop_migrate.lease.registry import RELAY, sibling
from cmdop_migrate.model import Record, Spec
from cmdop_migrate.session import host_mounts
from cmdop_migrate.session.spawn_holder import overlays
from cmdop_migrate.util.paths import is_under

HOLDERS = "holders"  # the cgroup, beside those of the sessions, that all holders of this host are in


def holder_order(config: Config, this_host: Host, record: Record) -> dict[str, Any]:
    """Return what every holder needs to know, whether its session is new or restored. Create the holders' cgroup."""
    directory, group = this_host.directory(record.session), this_host.cgroup(record.session)
    holders = os.path.join(os.path.dirname(group), HOLDERS)
    cgroup.create(holders)
    hidden = private_paths(config)
    points = list(record.layers) or host_mounts.read_layers(hidden, record.spec.shares)
    resolv = host_mounts.resolv_conf(record.link.gateway if record.link else None)
    record = replace(record, layers=tuple(points), binds=record.spec.shares)
    return {
        "record": record.to_json(),
        "dir": str(directory),
        "root": str(directory / "root"),
        "socket": str(this_host.socket(record.session)),
        "cgroup": group,
        "holders": holders,
        "ring": config.ring_size,
        "overlays": overlays(points),
        "hidden": hidden,
        "resolv": resolv,
        "binds": [[share, False] for share in record.binds],
        "gate": _gate_order(config, record.spec),
    }


def _gate_order(config: Config, spec: Spec) -> dict[str, Any] | None:
    address = spec.gate or config.gate
    if address is None:
        return None
    return {"address": address, "timeout": config.gate_timeout, "on_error": config.gate_on_error}


def private_paths(config: Config) -> list[str]:
    """Return the paths that no session may see: keys, other sessions, the store, the lease store. A path below another
    one of them is left out."""
    paths = [str(config.state_dir), str(config.run_dir), str(config.key_file), str(config.relay_credential)]
    for url in (config.store, config.lease, sibling(config.lease, RELAY)):
        parts = urlsplit(url)
        if parts.scheme in ("file", "sqlite"):
            paths.append(parts.path)
    paths = [os.path.realpath(path) for path in paths]
    return sorted({path for path in paths if not any(path != top and is_under(path, top) for top in paths)})
