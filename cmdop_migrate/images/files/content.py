"""Read one file that must not change: where its data is, and the data in pieces."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from cmdop_migrate.images.files.file_table import CHUNK
from cmdop_migrate.images.files.walk import Node, changed

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOATIME | os.O_CLOEXEC


Segments = tuple[tuple[int, int], ...]
_GONE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ESTALE)


def open_met(directory: int, node: Node) -> int:
    """Open the very file that the walk met. Raise Blocked if it has changed since."""
    try:
        fd = os.open(node.name, _READ_FLAGS, dir_fd=directory)
    except OSError as error:
        if error.errno in _GONE:
            raise changed(node.path) from error
        raise
    if not _unchanged(fd, node):
        os.close(fd)
        raise changed(node.path)
    return fd


def _unchanged(fd: int, node: Node) -> bool:
    now, met = os.fstat(fd), node.stat
    return (
        now.st_ctime_ns == met.st_ctime_ns
        and now.st_mtime_ns == met.st_mtime_ns
        and now.st_size == met.st_size
        and now.st_ino == met.st_ino
    )


def segments(node: Node) -> Segments:
    """Return where a file has data, as (offset, length)."""
    size = node.stat.st_size
    if node.stat.st_blocks * 512 >= size:
        return ((0, size),) if size else ()
    pieces = []
    fd = open_met(node.fd, node)
    try:
        end = 0
        while end < size:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
            if start < end:
                pieces.append((start, end - start))
    except OSError as error:
        if error.errno != errno.ENXIO:  # only a hole is left
            raise
    finally:
        os.close(fd)
    return tuple(pieces)


def parts(directory: int, node: Node, where: Segments) -> Iterator[tuple[int, bytes]]:
    """Yield the data of a file in pieces that do not cross a 1 MiB boundary. Raise Blocked if the file changed."""
    fd = open_met(directory, node)
    try:
        for start, length in where:
            offset = start
            while offset < start + length:
                want = min(start + length - offset, CHUNK - offset % CHUNK)
                data = os.pread(fd, want, offset)
                if len(data) != want:
                    raise changed(node.path)
                yield offset, data
                offset += want
        if not _unchanged(fd, node):
            raise changed(node.path)
    finally:
        os.close(fd)


def whole(directory: int, node: Node, where: Segments) -> bytes:
    """Return all the data of a small file. Raise Blocked if the file changed."""
    fd = open_met(directory, node)
    try:
        data = [os.pread(fd, length, offset) for offset, length in where]
        if not _unchanged(fd, node) or any(len(part) != want[1] for part, want in zip(data, where, strict=True)):
            raise changed(node.path)
    finally:
        os.close(fd)
    return data[0] if len(data) == 1 else b"".join(data)


def on_tmpfs(root: Path) -> bool:
    """Tell whether the file system of `root` lives in memory."""
    device = os.stat(root).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as mounts:
        return any(
            fields[2] == number and fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
            for fields in (line.split(" ") for line in mounts)
        )
