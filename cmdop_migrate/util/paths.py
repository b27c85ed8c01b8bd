"""Compare paths, and name those that every session's view of the host's files treats specially."""

from __future__ import annotations

SPECIAL = ("/proc", "/sys", "/dev", "/run")  # of the kernel, or mounted for each session
RESOLV = "/etc/resolv.conf"


def is_under(path: str, top: str) -> bool:
    """Return whether `path` is `top` or lies below it. Both are absolute and normalized."""
    return path == top or path.startswith(top.rstrip("/") + "/")
