"""Find the files that a session's processes have mapped or open, and whether they are its own or this host's.

Its own files (changed by it, so in an upper layer) travel with it. The host's
must be the same where it is restored, or be carried along.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cmdop_migrate.session import inotify_watches, overlay_redirects
from cmdop_migrate.util.paths import is_under

_NOT_FILES = ("/proc/", "/sys/", "/dev/", "/run/", "/memfd:", "/SYSV", "/[aio]", "/anon_hugepage")
_DELETED = " (deleted)"


@dataclass
class Touched:
    """Hold the files in use. `mapped`, `opened`: paths of the host; `renamed`: the session's names of those that are in
    a directory it has renamed. `written`: (layer, path in its upper) of files that a process may change through memory,
    without a change of any time stamp. `watched`: what processes watch, and what of it CRIU cannot carry."""

    mapped: set[str] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)
    written: set[tuple[int, bytes]] = field(default_factory=set)
    watched: inotify_watches.Watched = field(default_factory=inotify_watches.Watched)


class Layers:
    """Find the layer that a file lies in, by the path that /proc shows."""

    def __init__(self, points: Iterable[str], uppers: Iterable[Path]) -> None:
        self.points, self.uppers = list(points), list(uppers)
        self._lower = [overlay_redirects.LowerNames(upper) for upper in self.uppers]

    def find(self, shown: str, inside: str | None = None) -> tuple[int, str] | None:
        """Return the layer and the path below its mount point. `inside` is the point of the mount the file is on, when
        known; otherwise the first layer that has such a file is taken."""
        for number, below in self._ways(shown):
            point = self.points[number]
            if inside is not None and point != inside:
                continue
            if self.is_own(number, below) or os.path.lexists(self.host_path(number, below)):
                return number, below
        return None

    def own(self, shown: str) -> set[tuple[int, str]]:
        """Return every file of the session's own that may be meant; /proc shows a newline in the name of a mapped file
        as \\012."""
        names = {shown, shown.replace("\\012", "\n")}
        return {way for name in names for way in self._ways(name) if self.is_own(*way)}

    def _ways(self, shown: str) -> Iterator[tuple[int, str]]:
        """Yield where the file may lie. /proc shows a path from the session's root; some kernels show it below its
        mount."""
        above = [(len(point), number) for number, point in enumerate(self.points) if is_under(shown, point)]
        for _, number in sorted(above, reverse=True)[:1]:  # the innermost mount hides what is below its mount point
            yield number, os.path.relpath(shown, self.points[number])
        for number in range(len(self.points)):
            yield number, shown.lstrip("/")

    def is_own(self, number: int, below: str) -> bool:
        """Return whether the session has changed this file."""
        return os.path.lexists(self.uppers[number] / below)

    def host_path(self, number: int, below: str) -> str:
        """Return where the host has a file that is not the session's own."""
        return os.path.join(self.points[number], self._lower[number].find(below))


def look(pids: Iterable[int], layers: Layers, before: Touched | None = None) -> Touched:
    """Return all files that the processes use now. A process that ends meanwhile is skipped. `before`: the result of an
    earlier look; with it, the search for watched files is short."""
    pids = list(pids)
    touched = Touched()
    for pid in pids:
        try:
            _maps(pid, layers, touched)
            _fds(pid, layers, touched)
        except (FileNotFoundError, ProcessLookupError):
            continue
    if before is None:
        touched.watched = inotify_watches.find(pids, layers.uppers)
    else:
        touched.watched = inotify_watches.find(
            pids, layers.uppers, before.watched.paths.values(), inotify_watches.AGAIN
        )
    return touched


def _maps(pid: int, layers: Layers, touched: Touched) -> None:
    seen = set()
    for line in Path(f"/proc/{pid}/maps").read_bytes().decode("utf-8", "surrogateescape").split("\n"):
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith("/") or (fields[1][1:4:2], fields[5]) in seen:
            continue
        permissions, path = fields[1], fields[5]
        seen.add((permissions[1:4:2], path))
        if permissions[1] == "w" and permissions[3] == "s":  # a file that is listed without need is only read once more
            touched.written |= {(number, os.fsencode(below)) for number, below in layers.own(path)}
        found = layers.find(path) if _is_file(path) else None
        if found is not None and not layers.is_own(*found):
            touched.mapped.add(_host_path(layers, found, touched))


def _fds(pid: int, layers: Layers, touched: Touched) -> None:
    mounts = _mounts(pid)
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            path = os.readlink(f"/proc/{pid}/fd/{name}")
            if not _is_file(path) or not stat.S_ISREG(os.stat(f"/proc/{pid}/fd/{name}").st_mode):
                continue
            found = layers.find(path, mounts.get(_mount_id(pid, name)))
        except (FileNotFoundError, ProcessLookupError):
            continue
        if found is not None and not layers.is_own(*found):
            touched.opened.add(_host_path(layers, found, touched))


def _is_file(path: str) -> bool:
    return path.startswith("/") and not path.endswith(_DELETED) and not path.startswith(_NOT_FILES)


def _host_path(layers: Layers, found: tuple[int, str], touched: Touched) -> str:
    path, shown = layers.host_path(*found), os.path.join(layers.points[found[0]], found[1])
    if path != shown:
        touched.renamed[path] = shown
    return path


def _mount_id(pid: int, fd: str) -> str:
    for line in Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines():
        if line.startswith("mnt_id:"):
            return line.split()[1]
    return ""


def _mounts(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/mountinfo").read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        if error.errno == errno.EINVAL:  # the process has left its namespaces already
            raise ProcessLookupError(pid) from None
        raise
    lines = [line.split(" ") for line in text.split("\n") if line]
    return {words[0]: words[4] for words in lines}
