"""The layer between the host's files and a session's: it hides what is private to this toolkit.

Stdlib only and little of it: loaded while a session starts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

SPECIAL = ("/proc", "/sys", "/dev", "/run")
RESOLV = "/etc/resolv.conf"


def is_under(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


def make_host_layer(top: str, points: Iterable[str], hidden: Iterable[str], resolv: str | None) -> dict[str, str]:
    """Fills `top` with a layer that goes between the host's files and the session's: whiteouts over what is
    private to this toolkit (keys, other sessions), and a resolv.conf that works from a network of its own.

    -> mount point -> directory under `top`, for the points that need one.
    """
    order = sorted(points, key=len, reverse=True)
    made: dict[str, str] = {}

    def place(path: str) -> str:
        point = next(one for one in order if is_under(path, one))
        if point not in made:
            made[point] = f"{top}/{len(made)}"
            _like(point, made[point])
        here, there = made[point], point
        for part in os.path.relpath(os.path.dirname(path), point).split("/"):
            here, there = f"{here}/{part}", f"{there}/{part}"
            if not os.path.lexists(here):
                _like(there, here)
        return f"{here}/{os.path.basename(path)}"

    for path in hidden:
        # Also what is not there yet: it must not appear in a running session when it is made.
        if os.path.isdir(os.path.dirname(path)) and not any(is_under(path, one) for one in SPECIAL):
            os.mknod(place(path), stat.S_IFCHR, os.makedev(0, 0))
    if resolv is not None:
        target = place(RESOLV)
        with open(target, "w", encoding="utf-8") as file:
            file.write(resolv)
        os.chmod(target, 0o644)
    return made


def _like(there: str, here: str) -> None:
    """A directory `here` that looks like `there`: where layers merge, the topmost one's owner and mode are seen."""
    info = os.stat(there)
    os.mkdir(here)
    os.chown(here, info.st_uid, info.st_gid)
    os.chmod(here, info.st_mode & 0o7777)
    os.utime(here, ns=(info.st_atime_ns, info.st_mtime_ns))
