"""Mounts of a session that CRIU neither dumps nor makes."""

from __future__ import annotations

from cmdop_migrate.criu import request
from cmdop_migrate.model import Record


def shared_mounts(record: Record, root: str) -> tuple[request.SharedMount, ...]:
    """What CRIU must not dump or make: the views of other file systems (ours to mount, under `root`) and shares."""
    layers = [
        request.SharedMount(f"layer{number}", point, f"{root}{point}")
        for number, point in enumerate(record.layers)
        if point != "/"
    ]
    shares = [request.SharedMount(f"share{number}", path, path) for number, path in enumerate(record.binds)]
    return (*layers, *shares)
