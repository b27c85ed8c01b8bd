"""Tell CRIU the paths of files that a session watches (inotify, fanotify).

CRIU looks a watched inode up by searching directories with everything below them, which may take longer than a session
can stay frozen. But first it reads the file irmap-cache, which its own pre-dump leaves beside the images, and takes an
entry whose device and inode number still fit. So that file is written when the session is frozen, before CRIU reads
it: right after the notification `pre-dump`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

from cmdop_migrate.criu.protobuf import bytes_field, number_field, with_records

NAME = "irmap-cache"  # without a suffix, unlike the other images
_SERVICE_MAGIC, _MAGIC = 0x55105940, 0x57004059
_DEVICE, _INODE, _PATH = 1, 2, 3


def write(images: Path, paths: Mapping[tuple[int, int], str]) -> None:
    """Write the cache. `paths`: (device, inode) as in fdinfo -> path from the session's root."""
    if paths:
        (images / NAME).write_bytes(cache(paths))


def cache(paths: Mapping[tuple[int, int], str]) -> bytes:
    """Return the content of the cache file."""
    head = struct.pack("<II", _SERVICE_MAGIC, _MAGIC)
    return with_records(
        head,
        (
            number_field(_DEVICE, device) + number_field(_INODE, inode) + bytes_field(_PATH, os.fsencode(path))
            for (device, inode), path in sorted(paths.items())
        ),
    )


def remove(images: Path) -> None:
    """Remove the cache: it is not part of the checkpoint."""
    (images / NAME).unlink(missing_ok=True)
