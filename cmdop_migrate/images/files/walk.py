"""Walk a tree that a session wrote, without ever leaving it.

Every step is relative to an open directory and follows no symlink. Only the current directory is held open, so depth
costs no descriptors; the way back up is `..`, checked against the directory it came from.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cmdop_migrate.errors import Blocked
from cmdop_migrate.images.files.file_table import MAX_DEPTH, REDIRECT, Xattrs, harmless, xattr_kept

DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def changed(path: bytes) -> Blocked:
    """Return the error for a file that changed while it was read."""
    return Blocked(
        f"{os.fsdecode(path) or 'the root of the layer'} changed while it was read",
        "Something outside the frozen session writes into its files; stop it and checkpoint again.",
    )


class Cursor:
    """Hold one open directory inside a tree. Close it after use."""

    def __init__(self, root: Path) -> None:
        self.fd = os.open(root, DIR_FLAGS)
        self.path: tuple[bytes, ...] = ()
        here = os.fstat(self.fd)
        self._ids = [(here.st_dev, here.st_ino)]

    def enter(self, name: bytes) -> None:
        """Descend into `name`, which must be a directory and no symlink."""
        self._step(os.open(name, DIR_FLAGS, dir_fd=self.fd))
        here = os.fstat(self.fd)
        self._ids.append((here.st_dev, here.st_ino))
        self.path = (*self.path, name)

    def leave(self) -> None:
        """Go up to the directory that `enter` came from. Raise Blocked if it was moved."""
        self._step(os.open("..", DIR_FLAGS, dir_fd=self.fd))
        self._ids.pop()
        self.path = self.path[:-1]
        here = os.fstat(self.fd)
        if (here.st_dev, here.st_ino) != self._ids[-1]:
            raise changed(b"/".join(self.path))

    def go(self, path: tuple[bytes, ...]) -> None:
        """Go to a directory anywhere in the tree."""
        if path == self.path:
            return
        shared = 0
        for here, there in zip(self.path, path, strict=False):
            if here != there:
                break
            shared += 1
        while len(self.path) > shared:
            self.leave()
        for name in path[shared:]:
            self.enter(name)

    def rejoin(self, root: Path) -> None:
        """Walk from the root towards `path` again, as far as it exists, because the current directory was moved."""
        path, again = self.path, Cursor(root)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in path:
                again.enter(name)
        self._step(again.fd)
        self.path, self._ids = again.path, again._ids

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def _step(self, fd: int) -> None:
        os.close(self.fd)
        self.fd = fd


class Node(NamedTuple):
    """Describe one name met on a walk; `fd` is its open parent (its own directory for the root), valid until the next
    step."""

    path: bytes
    directory: tuple[bytes, ...]
    name: bytes
    stat: os.stat_result
    fd: int

    @property
    def handle(self) -> bytes:
        """Return a path to this very name through the open parent, for calls that take no descriptor."""
        return b"/proc/self/fd/%d/%s" % (self.fd, self.name or b".")


def walk(root: Path, exclude: Collection[bytes] = (), *, live: bool = False, one_device: bool = True) -> Iterator[Node]:
    """Yield every name, parents first, siblings in byte order. `live`: skip names that vanish or are moved
    meanwhile."""
    cursor = Cursor(root)
    try:
        top = os.fstat(cursor.fd)
        yield Node(b"", (), b"", top, cursor.fd)
        stack = [_names(cursor.fd)]
        prefix = [b""]
        while stack:
            name = next(stack[-1], None)
            if name is None:
                stack.pop()
                prefix.pop()
                if stack:
                    _back(cursor, root, live)
                    del stack[len(cursor.path) + 1 :], prefix[len(cursor.path) + 1 :]
                continue
            path = prefix[-1] + name
            if path in exclude:
                continue
            try:
                info = os.stat(name, dir_fd=cursor.fd, follow_symlinks=False)
                if info.st_dev != top.st_dev and one_device:
                    raise Blocked(
                        f"{os.fsdecode(path)} in the session's files is a mount of another filesystem",
                        "Unmount it, or declare the directory shared (`run --share`).",
                    )
                yield Node(path, cursor.path, name, info, cursor.fd)
                if stat.S_ISDIR(info.st_mode):
                    if len(stack) >= MAX_DEPTH:
                        raise Blocked(
                            f"the session's directories are more than {MAX_DEPTH} levels deep", "Remove them."
                        )
                    cursor.enter(name)
                    stack.append(_names(cursor.fd))
                    prefix.append(path + b"/")
            except (FileNotFoundError, NotADirectoryError) as error:  # the latter: a file replaced a directory
                if not live:
                    raise changed(path) from error
    finally:
        cursor.close()


def _back(cursor: Cursor, root: Path, live: bool) -> None:
    """Go up one directory; if it, or one above it, was moved, go to the nearest directory that is still on the path."""
    try:
        cursor.leave()
    except Blocked:
        if not live:
            raise
        cursor.rejoin(root)


def _names(fd: int) -> Iterator[bytes]:
    return iter(sorted(map(os.fsencode, os.listdir(fd))))


def read_xattrs(node: Node) -> Xattrs:
    """Return the extended attributes that travel, by name. Raise Blocked if the layer depends on host files."""
    xattrs = []
    for name in sorted(os.listxattr(node.handle, follow_symlinks=False)):
        kept = xattr_kept(name)
        if kept is None or (name == REDIRECT and not stat.S_ISDIR(node.stat.st_mode)):
            raise Blocked(
                f"{os.fsdecode(node.path)} carries {name}, which ties it to files of this host",
                "Mount sessions with metacopy=off,index=off; copy it anew in the session.",
            )
        if kept:
            xattrs.append((name, os.getxattr(node.handle, name, follow_symlinks=False)))
    return tuple(xattrs)


@dataclass(frozen=True)
class Estimate:
    """Report what a capture would read: names, bytes of data, and device nodes that a restore refuses by default."""

    files: int
    data_bytes: int
    devices: tuple[bytes, ...]


def measure(root: Path, exclude: Collection[bytes] = ()) -> Estimate:
    """Estimate a capture without opening any file; usable on a running session."""
    files = 0
    total = 0
    devices = []
    seen: set[int] = set()
    for node in walk(root, exclude, live=True):
        files += 1
        mode = node.stat.st_mode
        if stat.S_ISREG(mode) and node.stat.st_ino not in seen:
            if node.stat.st_nlink > 1:
                seen.add(node.stat.st_ino)
            total += min(node.stat.st_size, node.stat.st_blocks * 512)
        elif (stat.S_ISCHR(mode) and node.stat.st_rdev) or stat.S_ISBLK(mode):
            rdev = os.major(node.stat.st_rdev), os.minor(node.stat.st_rdev)
            if not harmless("c" if stat.S_ISCHR(mode) else "b", rdev):
                devices.append(node.path)
    return Estimate(files, total, tuple(devices))
