"""Mounts of a session that CRIU neither dumps nor makes."""

from __future__ import annotations

from pathlib import Path

from cmdop_migrate.criu import request
from cmdop_migrate.errors import Blocked
from cmdop_migrate.model import Record
from cmdop_migrate.session import host_mounts

_MOVABLE = host_mounts.REAL - {"tmpfs"}  # CRIU makes a tmpfs anew wherever it is


def shared_mounts(record: Record, root: str) -> tuple[request.SharedMount, ...]:
    """What CRIU must not dump or make: the views of other file systems (ours to mount, under `root`) and shares."""
    layers = [
        request.SharedMount(f"layer{number}", point, f"{root}{point}")
        for number, point in enumerate(record.layers)
        if point != "/"
    ]
    shares = [request.SharedMount(f"share{number}", path, path) for number, path in enumerate(record.binds)]
    return (*layers, *shares)


def check_in_place(record: Record) -> None:
    """Raise Blocked if the session renamed a directory above one of these mounts: CRIU knows them by their place."""
    try:
        text = Path(f"/proc/{record.pid}/mountinfo").read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return  # it has ended: reported elsewhere
    mounts = host_mounts.parse_mounts(text)
    given, found = (*record.layers, *record.binds), {one.point for one in mounts}
    gone = [point for point in given if point not in found]
    moved = [one.point for one in mounts if one.kind in _MOVABLE and one.point not in given]
    if gone and moved:
        raise Blocked(
            f"session {record.name!r} renamed a directory that has a mount of the host below it: what was at"
            f" {gone[0]} is at {moved[0]} now",
            "The session goes on. Rename the directory back inside it, then try again.",
        )
