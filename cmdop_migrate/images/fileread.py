"""Reading one file that must not change: where its data is, and the data in pieces."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cmdop_migrate.images.filestats import stat_of
from cmdop_migrate.images.filetable import CHUNK
from cmdop_migrate.images.filetree import Node, changed

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOATIME | os.O_CLOEXEC


@contextmanager
def standing_still(node: Node) -> Iterator[None]:
    """A file that vanished, or is something else now, changed while it was read."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ESTALE):
            raise changed(node.path) from error
        raise


def segments(node: Node) -> list[tuple[int, int]]:
    """Where a file has data, as (offset, length)."""
    size = node.stat.st_size
    if node.stat.st_blocks * 512 >= size:
        return [(0, size)] if size else []
    found = []
    fd = os.open(node.name, _READ_FLAGS, dir_fd=node.fd)
    try:
        end = 0
        while end < size:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
            if start < end:
                found.append((start, end - start))
    except OSError as error:
        if error.errno != errno.ENXIO:  # only a hole is left
            raise
    finally:
        os.close(fd)
    return found


def parts(directory: int, node: Node, segments: list[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    """The data of a file in pieces that do not cross a 1 MiB boundary. Fails if it is not the file that was met."""
    fd = os.open(node.name, _READ_FLAGS, dir_fd=directory)
    try:
        if stat_of(os.fstat(fd)) != stat_of(node.stat):
            raise changed(node.path)
        for start, length in segments:
            offset = start
            while offset < start + length:
                want = min(start + length - offset, CHUNK - offset % CHUNK)
                data = os.pread(fd, want, offset)
                if len(data) != want:
                    raise changed(node.path)
                yield offset, data
                offset += want
        if stat_of(os.fstat(fd)) != stat_of(node.stat):
            raise changed(node.path)
    finally:
        os.close(fd)


def on_tmpfs(root: Path) -> bool:
    """Is this a filesystem that lives in memory?"""
    device = os.stat(root).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        return any(
            fields[2] == wanted and fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
            for fields in (line.split(" ") for line in mounts)
        )
