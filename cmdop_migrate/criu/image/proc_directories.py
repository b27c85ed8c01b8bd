"""Correct the names of open /proc/PID directories in CRIU's list of open files (files.img).

To check whether a process of /proc is dead, CRIU cuts the path behind the number and then writes a "/" there. A path
that ends with the number loses its terminator by that: it continues with the bytes that follow in memory, and the
restore does not find the file (files-reg.c, check_path_remap). The true names are read from the processes while they
are frozen.

A regular file is field 3 of a record; its name is field 6, its mode field 10.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from cmdop_migrate.criu.image.files_image import NAME
from cmdop_migrate.criu.protobuf import Message, edit_file, edited

_REGULAR, _PATH, _MODE = 3, 6, 10
_BELOW = re.compile(rb"(/proc/\d+)/", re.DOTALL)
_DIRECTORY = re.compile(rb"/proc/\d+$")


def correct_directories(images: Path, pids: Iterable[int]) -> None:
    """Rewrite the names in a complete dump of these processes, which are still frozen. Raise Malformed."""
    links = set(_links(pids))
    if any(map(_DIRECTORY.match, links)):
        edit_file(images / NAME, lambda image: corrected(image, links))


def corrected(image: bytes, links: Collection[bytes]) -> bytes:
    """Return the list of open files in which each /proc/PID directory that is in `links` has its own name.
    Raise Malformed."""

    def edit(entry: Message) -> None:
        regular = entry.inner(_REGULAR)
        path = regular.content(_PATH) if regular is not None else None
        if regular is None or path is None or path in links or not stat.S_ISDIR(regular.number(_MODE)):
            return
        match = _BELOW.match(path)
        if match is not None and match[1] in links:
            regular.set(_PATH, match[1])
            entry.set(_REGULAR, regular)

    return edited(image, edit)


def _links(pids: Iterable[int]) -> Iterator[bytes]:
    """Yield the paths below /proc of the descriptors and working directories of these processes, as they see them."""
    for pid in pids:
        base = f"/proc/{pid}".encode()
        try:
            names = [b"cwd", *(b"fd/" + name for name in os.listdir(base + b"/fd"))]
        except OSError:
            continue  # a zombie has no descriptors
        for name in names:
            try:
                link = os.readlink(base + b"/" + name)
            except OSError:
                continue
            if link.startswith(b"/proc/"):
                yield link
