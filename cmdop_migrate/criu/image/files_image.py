"""Edit CRIU's list of the files that a session had open (files.img).

CRIU refuses to open a file whose size or mode differs from the image. A log file that another program writes to would
keep its session from ever being restored. A size and a mode that are not in the image are not compared.

A regular file is field 3 of a record, with its path (6), its size (8) and its mode (10).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from cmdop_migrate.criu.protobuf import ImageFile, Message, edit_file, edited, records

NAME = "files.img"
_REGULAR, _PATH, _SIZE, _MODE = 3, 6, 8, 10
_REMAPS, _REMAP_TYPE, _LINKED = "remap-fpath.img", 3, 0


def skip_comparison(images: Path, paths: Collection[str]) -> None:
    """Have CRIU open the files at `paths`, as the session names them, also if their size or mode has changed.
    Raise Malformed."""
    encoded = {os.fsencode(path) for path in paths}
    edit_file(images / NAME, lambda image: uncompared(image, encoded))


def uncompared(image: bytes, paths: Collection[bytes]) -> bytes:
    """Return the list of open files without size and mode of the files at `paths`. Raise Malformed."""

    def edit(entry: Message) -> None:
        regular = entry.inner(_REGULAR)
        if regular is not None and regular.content(_PATH) in paths:
            regular.remove(_SIZE, _MODE)
            entry.set(_REGULAR, regular)

    return edited(image, edit)


def executables(image: bytes) -> set[bytes]:
    """Return the paths of open files that are executable by their mode. Raise Malformed."""
    paths = set()
    for encoded in records(image):
        regular = Message.parse(encoded).inner(_REGULAR)
        path = regular.content(_PATH) if regular is not None else None
        if regular is not None and path is not None and regular.number(_MODE) & 0o111:
            paths.add(path)
    return paths


def has_link_remaps(images: Path) -> bool:
    """Tell whether a dump made temporary hard links (`link_remap.N`) beside files that were unlinked while open.

    CRIU creates one where another hard link keeps the file alive, and removes it when it resumes the tree: the link
    exists only until `post-dump` is answered. Raise Malformed."""
    try:
        remaps = ImageFile(images / _REMAPS).records
    except FileNotFoundError:
        return False
    return any(remap.number(_REMAP_TYPE, _LINKED) == _LINKED for remap in remaps)
