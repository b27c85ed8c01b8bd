"""Where the files are that a process watches by inotify.

The kernel tells their inode numbers only, and CRIU must be told where to look
for them. So we look first: where such a program most likely watches, and if it
must be everywhere, for a bounded time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_USUAL = ("tmp", "etc", "home", "root", "srv", "run", "dev/shm", "var/log", "var/spool", "var/lib", "usr/share", "opt")
_SKIPPED = {"proc", "sys"}
SECONDS = 3.0


@dataclass
class Watched:
    """`paths`: as the session calls them; `missing`: how many were not found."""

    paths: set[str] = field(default_factory=set)
    missing: int = 0


def find(pid: int, uppers: Iterable[Path]) -> Watched:
    """What `pid` watches. Its tree may be running: what moves meanwhile is not found."""
    wanted = _inodes(pid)
    watched = Watched()
    if not wanted:
        return watched
    root = f"/proc/{pid}/root"
    until = time.monotonic() + SECONDS
    for path in _candidates(pid, root, uppers):
        try:
            if (number := os.stat(path).st_ino) in wanted:
                wanted.discard(number)
                watched.paths.add(path.removeprefix(root) or "/")
        except OSError:
            continue
        if not wanted or time.monotonic() > until:
            break
    watched.missing = len(wanted)
    return watched


def _inodes(pid: int) -> set[int]:
    found: set[int] = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            if os.readlink(f"/proc/{pid}/fd/{fd}") not in ("anon_inode:inotify", "anon_inode:[fanotify]"):
                continue
            lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            if line.startswith(("inotify", "fanotify ino")):
                found.update(int(word[4:], 16) for word in line.split() if word.startswith("ino:"))
    return found


def _candidates(pid: int, root: str, uppers: Iterable[Path]) -> Iterator[str]:
    """Likely ones first, all of them in the end; some twice."""
    here = root + os.readlink(f"/proc/{pid}/cwd")
    for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
        yield os.path.join(here, os.fsdecode(word).lstrip("/")) if word[:1] != b"/" else root + os.fsdecode(word)
    yield from _below(here, deep=True)
    while here != root and len(here) > len(root):
        yield from _below(here, deep=False)
        here = os.path.dirname(here)
    for upper in uppers:
        for path in _below(str(upper), deep=True):
            yield root + path.removeprefix(str(upper))
    for name in _USUAL:
        yield from _below(f"{root}/{name}", deep=False)
    yield root
    yield from _below(f"{root}/", deep=True)


def _below(top: str, deep: bool) -> Iterator[str]:
    yield top
    try:
        entries = list(os.scandir(top))
    except OSError:
        return
    for entry in entries:
        yield entry.path
    for entry in entries if deep else ():
        if entry.is_dir(follow_symlinks=False) and entry.name not in _SKIPPED:
            yield from _below(entry.path, deep=True)
