"""Tell CRIU the paths of files that a session watches (inotify, fanotify).

CRIU looks a watched inode up by searching directories, all below them included,
which may take longer than a session can be frozen. But first it looks into
the file irmap-cache, which its own pre-dump leaves beside the images, and takes what
is in there if device and inode number still fit. So that file is written when
the session is frozen, before CRIU reads it: right after the notification
`pre-dump`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

from cmdop_migrate.criu.image.raw import bytes_field, number_field, with_records

NAME = "irmap-cache"  # without a suffix, unlike the others
_SERVICE_MAGIC, _MAGIC = 0x55105940, 0x57004059
_DEVICE, _INODE, _PATH = 1, 2, 3


def write(images: Path, paths: Mapping[tuple[int, int], str]) -> None:
    """Write what CRIU will find first. `paths`: (device, inode) as in fdinfo -> path from the session's root."""
    if paths:
        (images / NAME).write_bytes(cache(paths))


def cache(paths: Mapping[tuple[int, int], str]) -> bytes:
    """Return the content of the file."""
    head = struct.pack("<II", _SERVICE_MAGIC, _MAGIC)
    return with_records(
        head,
        (
            number_field(_DEVICE, device) + number_field(_INODE, inode) + bytes_field(_PATH, os.fsencode(path))
            for (device, inode), path in sorted(paths.items())
        ),
    )


def remove(images: Path) -> None:
    """Remove it: it is no part of the checkpoint."""
    (images / NAME).unlink(missing_ok=True)
