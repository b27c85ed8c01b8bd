"""The files that a session had open, as CRIU lists them (files.img): what it must not hold against one that changed.

CRIU refuses to open a file that is longer than it was. For one that others write to, a log, that means for ever.
An image is two magic numbers, then records, each a u32 length and a protobuf message: of a regular file
(3), its name (6), its size (8) and its mode (10). What is left out is not compared.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from cmdop_migrate.criu.messages import Malformed, read_varint, varint

NAME = "files.img"
_HEAD = 8
_REGULAR, _PATH, _SIZE, _MODE = 3, 6, 8, 10
_REMAPS, _REMAP_TYPE, _LINKED = "remap-fpath.img", 3, 0


def open_as_found(images: Path, paths: Collection[str]) -> None:
    """The files at `paths`, as the session calls them, whatever they are now. Raises Malformed."""
    image = images / NAME
    image.write_bytes(uncompared(image.read_bytes(), {os.fsencode(path) for path in paths}))


def uncompared(image: bytes, paths: Collection[bytes]) -> bytes:
    made = bytearray(image[:_HEAD])
    for message in entries_of(image):
        entry = b"".join(_entry(message, paths))
        made += struct.pack("<I", len(entry)) + entry
    return bytes(made)


def executables(image: bytes) -> set[bytes]:
    """Those that might be run, by their mode. Raises Malformed."""
    found = set()
    for message in entries_of(image):
        for number, _, value in fields_of(message):
            held = {one: content for one, _, content in fields_of(value)} if number == _REGULAR else {}
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
    for message in entries_of(image):
        kind = {number: read_varint(value, 0)[0] for number, _, value in fields_of(message)}.get(_REMAP_TYPE, _LINKED)
        if kind == _LINKED:
            return True
    return False


def entries_of(image: bytes) -> Iterator[bytes]:
    """Split an image file into its protobuf messages. Raises Malformed."""
    at = _HEAD
    while at < len(image):
        if at + 4 > len(image):
            raise Malformed("the list of open files is cut short")
        (size,) = struct.unpack_from("<I", image, at)
        at += 4 + size
        if at > len(image):
            raise Malformed("the list of open files is cut short")
        yield image[at - size : at]


def _entry(message: bytes, paths: Collection[bytes]) -> Iterator[bytes]:
    for number, field, value in fields_of(message):
        if number == _REGULAR and any(one == _PATH and held in paths for one, _, held in fields_of(value)):
            kept = b"".join(inner for one, inner, _ in fields_of(value) if one not in (_SIZE, _MODE))
            field = varint(_REGULAR << 3 | 2) + varint(len(kept)) + kept
        yield field


def fields_of(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Split a protobuf message into (field number, the encoded field, its content). Raises Malformed."""
    at = 0
    while at < len(message):
        start = at
        tag, at = read_varint(message, at)
        if tag & 7 == 0:
            begin, (_, at) = at, read_varint(message, at)
        elif tag & 7 == 2:
            size, begin = read_varint(message, at)
            at = begin + size
        elif tag & 7 in (1, 5):
            begin, at = at, at + (8 if tag & 7 == 1 else 4)
        else:
            raise Malformed(f"wire type {tag & 7} in the list of open files")
        if at > len(message):
            raise Malformed("the list of open files is cut short")
        yield tag >> 3, message[start:at], message[begin:at]
