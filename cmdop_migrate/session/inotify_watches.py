"""Find the paths of files that processes watch by inotify or fanotify.

The kernel tells device and inode number only, and CRIU needs the path of each
(criu/image/watched_paths.py). Likely places are searched first, shallow before deep, and
all of the session's files last, for a bounded time. A watch whose file has no
path any more, or of a kind that CRIU loses, is reported, so that the checkpoint
can be refused while the session still runs.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from cmdop_migrate.util.paths import is_under

_USUAL = ("etc", "tmp", "home", "root", "srv", "run", "dev/shm", "var/log", "var/spool", "var/lib", "usr/share", "opt")
_SKIPPED = frozenset({"proc", "sys"})  # at the root: CRIU finds what is watched there by its file handle
_LATE = frozenset({"node_modules", ".git", ".venv", "venv", "site-packages", "__pycache__", ".cache", "target"})
_SEARCHED = frozenset({"overlay", "tmpfs"})  # what is not found on these, CRIU does not find either
_NOTIFIERS = ("anon_inode:inotify", "anon_inode:[fanotify]")
SECONDS = 5.0  # that a search takes at most
_TURN = 512  # paths of one deep directory, before the next one has its turn
AGAIN = 1.0  # seconds for a second search: most paths are known, and the session is frozen

Key = tuple[int, int]  # device, as fdinfo writes it, and inode number


class Cause(StrEnum):
    """Say why a watch cannot be carried."""

    DELETED = "a file that has been deleted"
    NOT_FOUND = "a file whose path was not found"
    FILE_SYSTEM = "a whole file system, by fanotify (FAN_MARK_FILESYSTEM), which CRIU does not carry"


@dataclass(frozen=True)
class Lost:
    """Name a process that watches something a checkpoint cannot carry."""

    pid: int
    command: str
    cause: Cause

    def __str__(self) -> str:
        return f"{self.command} (pid {self.pid}) watches {self.cause}"


@dataclass
class Watched:
    """Hold the watched paths, as the session names them. `lost`: what a dump would fail with, or leave out."""

    paths: dict[Key, str] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)


@dataclass(frozen=True)
class Marks:
    """Hold what one process watches. `others`: it has marks that are neither on a file nor on a mount."""

    keys: frozenset[Key] = frozenset()
    others: bool = False


@dataclass(frozen=True)
class _Mounts:
    """Hold a session's mounts: the device of each mount point, the kind of each device."""

    devices: dict[str, int]
    kinds: dict[int, str]


def find(pids: Iterable[int], uppers: Collection[Path], known: Iterable[str] = (), seconds: float = SECONDS) -> Watched:
    """Find what these processes watch. They may be running: a file that is moved meanwhile may not be found.

    `known`: paths to try first. A process that ends meanwhile is left out.
    """
    pids = list(pids)
    marks = {pid: own for pid in pids if (own := _marks(pid)) != Marks()}
    deleted = _deleted(pids) if marks else frozenset[Key]()
    watched = Watched(lost=[_lost(pid, Cause.FILE_SYSTEM) for pid, own in marks.items() if own.others])
    known = list(known)
    until = time.monotonic() + seconds
    for namespace in _namespaces(marks):
        try:
            _search(namespace, marks, deleted, uppers, known, until, watched)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return watched


def _search(
    pids: list[int],
    marks: dict[int, Marks],
    deleted: frozenset[Key],
    uppers: Collection[Path],
    known: list[str],
    until: float,
    watched: Watched,
) -> None:
    """Find what these processes, which share their mounts, watch. What is deleted is not searched for."""
    wanted = {key for pid in pids for key in marks[pid].keys} - deleted
    top = next((pid for pid in pids if os.readlink(f"/proc/{pid}/root") == "/"), pids[0])
    root, mounts = f"/proc/{top}/root", _read_mounts(top)
    exhausted = _look_at(_candidates(pids, root, uppers, known, {ino for _, ino in wanted}), root, wanted, mounts,
                         until, watched)  # fmt: skip
    for pid in pids:
        now = _marks(pid).keys  # a watch may have ended meanwhile
        left = now & wanted
        if now & deleted:
            watched.lost.append(_lost(pid, Cause.DELETED))
        elif any(mounts.kinds.get(device) == "overlay" or exhausted for device, _ in _on_searched(left, mounts)):
            watched.lost.append(_lost(pid, Cause.NOT_FOUND))


def _look_at(
    candidates: Iterator[str], root: str, wanted: set[Key], mounts: _Mounts, until: float, watched: Watched
) -> bool:
    """Remove from `wanted` what is found. Return whether every candidate was looked at."""
    for number, path in enumerate(candidates):
        if not wanted:
            return True
        if number % 64 == 0 and time.monotonic() > until:
            return False
        try:
            # /proc/PID/root is a link itself; with a slash it is the directory.
            info = os.stat(path if path != root else f"{root}/", follow_symlinks=False)
        except OSError:
            continue
        key = os.major(info.st_dev) << 20 | os.minor(info.st_dev), info.st_ino
        inside = path.removeprefix(root).rstrip("/") or "/"
        # The device of its mount too: on a file system that holds layers, another file may have the same numbers.
        if key in wanted and _device(inside, mounts.devices) == key[0]:
            watched.paths[key] = inside
            wanted.discard(key)
    return True


def _lost(pid: int, cause: Cause) -> Lost:
    try:
        command = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        command = "?"
    return Lost(pid, command, cause)


def _on_searched(keys: Iterable[Key], mounts: _Mounts) -> list[Key]:
    return [key for key in keys if mounts.kinds.get(key[0]) in _SEARCHED]


def _namespaces(pids: Iterable[int]) -> list[list[int]]:
    """Group processes by their mount namespace."""
    groups: dict[str, list[int]] = {}
    for pid in pids:
        try:
            groups.setdefault(os.readlink(f"/proc/{pid}/ns/mnt"), []).append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return list(groups.values())


def _read_mounts(pid: int) -> _Mounts:
    """Read the file systems' device numbers, as fdinfo writes them. A file's own `st_dev` may be another, where layers
    lie on several file systems and the kernel does not unite their inode numbers (xino)."""
    devices, kinds = {}, {}
    for line in Path(f"/proc/{pid}/mountinfo").read_bytes().decode("utf-8", "surrogateescape").split("\n")[:-1]:
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        major, minor = map(int, fields[2].split(":"))
        device = major << 20 | minor
        devices[re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[4])] = device
        kinds[device] = right.split(" ")[0]
    return _Mounts(devices, kinds)


def _device(path: str, devices: dict[str, int]) -> int | None:
    while path not in devices and path != "/":
        path = os.path.dirname(path)
    return devices.get(path)


def _marks(pid: int) -> Marks:
    """Read what a process watches now; nothing, if it has ended."""
    keys: set[Key] = set()
    others = False
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return Marks()
    for fd in descriptors:
        try:
            if os.readlink(f"/proc/{pid}/fd/{fd}") not in _NOTIFIERS:
                continue
            info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found = parse(info)
        keys |= found.keys
        others |= found.others
    return Marks(frozenset(keys), others)


def parse(info: str) -> Marks:
    """Return the marks in the text of /proc/PID/fdinfo/FD of an inotify or fanotify descriptor. Pure."""
    keys: set[Key] = set()
    others = False
    for line in info.splitlines():
        if line.startswith(("inotify wd:", "fanotify ino:")):
            words = dict(word.split(":", 1) for word in line.split() if ":" in word)
            keys.add((int(words["sdev"], 16), int(words["ino"], 16)))
        elif line.startswith("fanotify ") and not line.startswith(("fanotify flags:", "fanotify mnt_id:")):
            others = True
    return Marks(frozenset(keys), others)


def _deleted(pids: Iterable[int]) -> frozenset[Key]:
    """Return the files without any name left that these processes keep alive: open, or as a working directory."""
    found: set[Key] = set()
    for pid in pids:
        try:
            places = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")] + [f"/proc/{pid}/cwd"]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for place in places:
            try:
                if os.readlink(place).endswith(" (deleted)") and (info := os.stat(place)).st_nlink == 0:
                    found.add((os.major(info.st_dev) << 20 | os.minor(info.st_dev), info.st_ino))
            except OSError:
                continue
    return frozenset(found)


def _candidates(
    pids: list[int], root: str, uppers: Collection[Path], known: Iterable[str], numbers: set[int]
) -> Iterator[str]:
    """Yield likely paths first, and all of them in the end; some twice. `numbers`: the inode numbers that are searched
    for."""
    yield from (root + path for path in known)
    here: list[str] = []
    for pid in pids:
        try:
            place = root + os.readlink(f"/proc/{pid}/cwd").rstrip("/")
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        here += [place] if place not in here else []
        for word in map(os.fsdecode, words):
            yield root + word if word.startswith("/") else os.path.join(place, word)
    yield root
    for place in here:
        while len(place) > len(root):
            yield from _below(place, numbers, deep=False)
            place = os.path.dirname(place)
    yield from _below(root, numbers, deep=False)
    for name in _USUAL:
        yield from _below(f"{root}/{name}", numbers, deep=False)
    for upper in uppers:
        # The path is looked at in the session, where the numbers differ.
        yield from (root + path.removeprefix(str(upper)) for path in _below(str(upper), None, deep=True))
    depths = [*here, *(target for place in here for target in _link_targets(place, root)), root]
    yield from _in_turn([_below(place, numbers, deep=True) for place in depths])


def _link_targets(place: str, root: str) -> Iterator[str]:
    """Yield where the symbolic links in a directory point to, if that is elsewhere: modules are often linked."""
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.is_symlink():
                    target = os.path.join(place.removeprefix(root) or "/", os.readlink(entry.path))
                    found = root + os.path.normpath(target)
                    if not is_under(found, place) and not is_under(place, found):
                        yield found
    except OSError:
        return


def _in_turn(sources: list[Iterator[str]]) -> Iterator[str]:
    """Yield some paths of each source in turn, so that a large directory does not use up the time for the others."""
    waiting = deque(sources)
    while waiting:
        source = waiting.popleft()
        some = list(itertools.islice(source, _TURN))
        yield from some
        if some:
            waiting.append(source)


def _below(top: str, numbers: set[int] | None, deep: bool) -> Iterator[str]:
    """Yield directories, and of files those with one of these inode numbers; the nearest first, and directories in
    which programs keep many files last."""
    yield top
    now, late = deque([top]), deque[str]()
    while now or late:
        place = (now or late).popleft()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    is_directory = entry.is_dir(follow_symlinks=False)
                    if is_directory or numbers is None or entry.inode() in numbers:
                        yield entry.path
                    if deep and is_directory and not (entry.name in _SKIPPED and _is_root(place)):
                        (late if entry.name in _LATE else now).append(entry.path)
        except OSError:
            continue


def _is_root(place: str) -> bool:
    return re.fullmatch(r"/proc/\d+/root/?", place) is not None
