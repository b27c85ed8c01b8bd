"""Correct the names of open /proc/PID directories in CRIU's list of open files (files.img).

To see whether a process of /proc is dead, CRIU cuts the path behind the number and then writes a "/" there. A path
that ends with the number loses its end by that: what follows is whatever was in memory, and the restore does not find
the file (files-reg.c, check_path_remap). The true names are read from the processes while they are frozen.

A regular file is field 3 of a record; its name is field 6, its mode field 10.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from cmdop_migrate.criu.image.files_image import NAME
from cmdop_migrate.criu.image.raw import bytes_field, fields, records, with_records
from cmdop_migrate.criu.rpc import read_varint

_REGULAR, _PATH, _MODE = 3, 6, 10
_BELOW = re.compile(rb"(/proc/\d+)/", re.DOTALL)
_DIRECTORY = re.compile(rb"/proc/\d+$")


def correct_directories(images: Path, pids: Iterable[int]) -> None:
    """Rewrite the names in a dump that is complete, of these processes, which are frozen. Raises Malformed."""
    links = set(_links(pids))
    if not any(map(_DIRECTORY.match, links)):
        return
    image = images / NAME
    image.write_bytes(corrected(image.read_bytes(), links))


def corrected(image: bytes, links: Collection[bytes]) -> bytes:
    """Return the list of open files in which each /proc/PID directory that is in `links` has its name again."""
    return with_records(image, (b"".join(_entry(message, links)) for message in records(image)))


def _entry(message: bytes, links: Collection[bytes]) -> Iterator[bytes]:
    for number, field, value in fields(message):
        if number == _REGULAR:
            file = b"".join(_file(value, links))
            yield bytes_field(_REGULAR, file)
        else:
            yield field


def _file(message: bytes, links: Collection[bytes]) -> Iterator[bytes]:
    held = {number: value for number, _, value in fields(message)}
    found = _BELOW.match(held.get(_PATH, b""))
    is_directory = _MODE in held and stat.S_ISDIR(read_varint(held[_MODE], 0)[0])
    is_wrong = found is not None and is_directory and found[1] in links and held[_PATH] not in links
    for number, field, _ in fields(message):
        if is_wrong and found is not None and number == _PATH:
            yield bytes_field(_PATH, found[1])
        else:
            yield field


def _links(pids: Iterable[int]) -> Iterator[bytes]:
    """Yield what the descriptors and working directories of these processes are, as the processes see it."""
    for pid in pids:
        base = f"/proc/{pid}".encode()
        try:
            names = [b"cwd", *(b"fd/" + name for name in os.listdir(base + b"/fd"))]
        except OSError:
            continue  # a zombie has none
        for name in names:
            try:
                link = os.readlink(base + b"/" + name)
            except OSError:
                continue
            if link.startswith(b"/proc/"):
                yield link
