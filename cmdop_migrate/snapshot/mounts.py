"""List and check the mounts of a session that CRIU neither dumps nor creates."""

from __future__ import annotations

from pathlib import Path

from cmdop_migrate.criu import request
from cmdop_migrate.errors import Blocked
from cmdop_migrate.model import Record
from cmdop_migrate.session import host_mounts

_MOVABLE = host_mounts.REAL - {"tmpfs"}  # CRIU creates a tmpfs wherever it is


def shared_mounts(record: Record, root: str) -> tuple[request.SharedMount, ...]:
    """Return the mounts that CRIU must neither dump nor create: overlays of other file systems, which the holder mounts
    under `root`, and shares."""
    layers = [
        request.SharedMount(f"layer{number}", point, f"{root}{point}")
        for number, point in enumerate(record.layers)
        if point != "/"
    ]
    shares = [request.SharedMount(f"share{number}", path, path) for number, path in enumerate(record.binds)]
    return (*layers, *shares)


def check_in_place(record: Record) -> None:
    """Raise Blocked if the session renamed a directory above one of these mounts: CRIU knows them by their path."""
    try:
        text = Path(f"/proc/{record.pid}/mountinfo").read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return  # the session has ended: reported elsewhere
    mounts = host_mounts.parse_mounts(text)
    expected, present = (*record.layers, *record.binds), {mount.point for mount in mounts}
    gone = [point for point in expected if point not in present]
    moved = [mount.point for mount in mounts if mount.kind in _MOVABLE and mount.point not in expected]
    if gone and moved:
        raise Blocked(
            f"session {record.name!r} renamed a directory that has a mount of the host below it: what was at"
            f" {gone[0]} is at {moved[0]} now",
            "The session keeps running. Rename the directory back inside it, then try again.",
        )
