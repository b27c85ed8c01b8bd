"""Where the files are that a process watches by inotify.

The kernel tells their inode numbers only, and CRIU must be told where to look
for them. So we look first: where such a program most likely watches, and if it
must be everywhere, for a bounded time.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_USUAL = ("tmp", "etc", "home", "root", "srv", "run", "dev/shm", "var/log", "var/spool", "var/lib", "usr/share", "opt")
_SKIPPED = {"proc", "sys"}
SECONDS = 3.0
LONGER = 0.3  # once there is one for each that may be it


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
    maybe: set[tuple[int, int]] = set()
    numbers = {number for _, number in wanted}
    devices = _devices(pid)
    root = f"/proc/{pid}/root"
    until = time.monotonic() + SECONDS
    for path in _candidates(pid, root, uppers):
        try:
            if (info := os.stat(path)).st_ino in numbers:
                inside = path.removeprefix(root) or "/"
                device = _device(inside, devices)
                if (found := (device, info.st_ino)) in wanted:
                    watched.paths.add(inside)
                    if os.major(info.st_dev) << 20 | os.minor(info.st_dev) == device:
                        wanted.discard(found)
                    else:  # a file of a lower layer: its number may be that of another, too
                        maybe.add(found)
                        until = min(until, time.monotonic() + LONGER) if wanted <= maybe else until
        except OSError:
            continue
        if not wanted or time.monotonic() > until:
            break
    watched.missing = len(wanted - maybe)
    return watched


def _devices(pid: int) -> dict[str, int]:
    """Of each mount point the file system's number, as fdinfo writes it. A file's own `st_dev` may be another: where
    layers lie on several."""
    found = {}
    for line in Path(f"/proc/{pid}/mountinfo").read_bytes().decode("utf-8", "surrogateescape").split("\n")[:-1]:
        fields = line.split(" ")
        major, minor = map(int, fields[2].split(":"))
        found[re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[4])] = major << 20 | minor
    return found


def _device(path: str, devices: dict[str, int]) -> int | None:
    while path not in devices and path != "/":
        path = os.path.dirname(path)
    return devices.get(path)


def _inodes(pid: int) -> set[tuple[int, int]]:
    """Which file system, and which number in it."""
    found: set[tuple[int, int]] = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            if os.readlink(f"/proc/{pid}/fd/{fd}") not in ("anon_inode:inotify", "anon_inode:[fanotify]"):
                continue
            lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            if line.startswith(("inotify", "fanotify ino")):
                words = dict(word.split(":", 1) for word in line.split() if ":" in word)
                found.add((int(words["sdev"], 16), int(words["ino"], 16)))
    return found


def _candidates(pid: int, root: str, uppers: Iterable[Path]) -> Iterator[str]:
    """Likely ones first, all of them in the end; some twice."""
    here = root + os.readlink(f"/proc/{pid}/cwd")
    for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
        yield os.path.join(here, os.fsdecode(word).lstrip("/")) if word[:1] != b"/" else root + os.fsdecode(word)
    yield from _below(here, deep=False)
    for upper in uppers:
        for path in _below(str(upper), deep=True):
            yield root + path.removeprefix(str(upper))
    yield from _below(here, deep=True)
    while here != root and len(here) > len(root):
        yield from _below(here, deep=False)
        here = os.path.dirname(here)
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
