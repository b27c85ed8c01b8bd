"""The files that a session had open, as CRIU lists them (files.img): what it must not hold against one that changed.

CRIU refuses to open a file that is longer than it was. For one that others write to, a log, that means for ever.
An image is two magic numbers, then records, each a u32 length and a protobuf message: of a regular file
(3), its name (6), its size (8) and its mode (10). What is left out is not compared.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from cmdop_migrate.criu.image.raw import bytes_field, fields, records, with_records
from cmdop_migrate.criu.rpc import read_varint

NAME = "files.img"
_REGULAR, _PATH, _SIZE, _MODE = 3, 6, 8, 10
_REMAPS, _REMAP_TYPE, _LINKED = "remap-fpath.img", 3, 0


def open_as_found(images: Path, paths: Collection[str]) -> None:
    """The files at `paths`, as the session calls them, whatever they are now. Raises Malformed."""
    image = images / NAME
    image.write_bytes(uncompared(image.read_bytes(), {os.fsencode(path) for path in paths}))


def uncompared(image: bytes, paths: Collection[bytes]) -> bytes:
    return with_records(image, (b"".join(_entry(message, paths)) for message in records(image)))


def executables(image: bytes) -> set[bytes]:
    """Those that might be run, by their mode. Raises Malformed."""
    found = set()
    for message in records(image):
        for number, _, value in fields(message):
            held = {one: content for one, _, content in fields(value)} if number == _REGULAR else {}
            if _PATH in held and _MODE in held and read_varint(held[_MODE], 0)[0] & 0o111:
                found.add(held[_PATH])
    return found


def has_link_remaps(images: Path) -> bool:
    """Tell whether a dump made temporary hard links (`link_remap.N`) beside files that were unlinked while open.

    CRIU makes one where another hard link keeps the file alive, and removes it when it lets the tree go on: the link
    is there only until `post-dump` is answered. Raises Malformed."""
    try:
        image = (images / _REMAPS).read_bytes()
    except FileNotFoundError:
        return False
    for message in records(image):
        kind = {number: read_varint(value, 0)[0] for number, _, value in fields(message)}.get(_REMAP_TYPE, _LINKED)
        if kind == _LINKED:
            return True
    return False


def _entry(message: bytes, paths: Collection[bytes]) -> Iterator[bytes]:
    for number, field, value in fields(message):
        if number == _REGULAR and any(one == _PATH and held in paths for one, _, held in fields(value)):
            kept = b"".join(inner for one, inner, _ in fields(value) if one not in (_SIZE, _MODE))
            field = bytes_field(_REGULAR, kept)
        yield field
