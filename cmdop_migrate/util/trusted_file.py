"""Which files of this host may be run as root. Stdlib only: the holder may load this."""

from __future__ import annotations

import os
import stat


def refusal(path: str) -> str:
    """Why this file must not be run as root; empty when it may. Whoever can write it, or put another in its place,
    would be root."""
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
        return "others than root may write it"
    return f"others than root may write in {open_to_others[0]}" if open_to_others else ""


def _parents(path: str) -> list[str]:
    found = []
    while path != "/":
        path = os.path.dirname(path)
        found.append(path)
    return found


def _is_open(info: os.stat_result) -> bool:
    """In a sticky directory, such as /tmp, nobody replaces what is another's."""
    return info.st_uid != 0 or bool(info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX)
