"""Decide which files of this host may be run as root. Stdlib only: the holder may load this."""

from __future__ import annotations

import os
import stat


def refusal(path: str) -> str:
    """Return why this file must not be run as root, or an empty string if it may. A user who can write it, or replace
    it, would become root."""
    if not os.path.isabs(path):
        return "not an absolute path"
    real = os.path.realpath(path)
    try:
        info = os.stat(real)
        open_to_others = [above for above in _parents(real) if _is_open(os.stat(above))]
    except OSError as error:
        return f"{error.strerror}"
    if not stat.S_ISREG(info.st_mode):
        return "not a file"
    if not info.st_mode & 0o100:
        return "not executable"
    if info.st_uid != 0 or info.st_mode & 0o022:
        return "users other than root may write it"
    return f"users other than root may write in {open_to_others[0]}" if open_to_others else ""


def _parents(path: str) -> list[str]:
    parents = []
    while path != "/":
        path = os.path.dirname(path)
        parents.append(path)
    return parents


def _is_open(info: os.stat_result) -> bool:
    """Return True if users other than root can replace files in this directory. In a sticky one, such as /tmp, they
    cannot replace files of others."""
    return info.st_uid != 0 or bool(info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX)
