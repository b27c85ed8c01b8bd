"""Compare and delete file trees of any depth in tests of the file layer."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from cmdop_migrate.images.files.file_table import xattr_kept
from cmdop_migrate.images.files.walk import Cursor, Node, walk


def remove_tree(root: Path) -> None:
    """Delete a tree of any depth, for which shutil.rmtree recurses too deep. Ignore a missing tree."""
    try:
        cursor = Cursor(root)
    except FileNotFoundError:
        return
    try:
        while True:
            below = None
            for name in sorted(map(os.fsencode, os.listdir(cursor.fd))):
                if stat.S_ISDIR(os.stat(name, dir_fd=cursor.fd, follow_symlinks=False).st_mode):
                    try:
                        os.rmdir(name, dir_fd=cursor.fd)
                    except OSError as error:
                        if error.errno != errno.ENOTEMPTY:
                            raise
                        below = name
                        break
                else:
                    os.unlink(name, dir_fd=cursor.fd)
            if below is not None:
                cursor.enter(below)
            elif cursor.path:
                cursor.leave()
            else:
                break
    finally:
        cursor.close()
    os.rmdir(root)


def snapshot(root: Path, see: Callable[[str], bool | None] = xattr_kept) -> dict[bytes, tuple[object, ...]]:
    """Return everything a program could see in a tree, by path, to prove that two trees are equal.

    Per name: type and permissions, owner, mtime, xattrs that `see` accepts, and
    by type size + content digest + first name of the same inode + link count,
    link target or device number. Reads every byte.
    """
    view: dict[bytes, tuple[object, ...]] = {}
    first: dict[tuple[int, int], bytes] = {}
    for node in walk(root, one_device=False):
        info = node.stat
        xattrs = tuple(
            (name, os.getxattr(node.handle, name, follow_symlinks=False))
            for name in sorted(os.listxattr(node.handle, follow_symlinks=False))
            if see(name)
        )
        own: tuple[object, ...] = ()
        if stat.S_ISREG(info.st_mode):
            own = (info.st_size, _content(node))
        elif stat.S_ISLNK(info.st_mode):
            own = (os.readlink(node.name, dir_fd=node.fd),)
        elif not stat.S_ISDIR(info.st_mode):
            own = (info.st_rdev,)
        whiteout = stat.S_ISCHR(info.st_mode) and not info.st_rdev
        if not stat.S_ISDIR(info.st_mode) and not whiteout:  # overlayfs itself links whiteouts to one inode
            own += (info.st_nlink, first.setdefault((info.st_dev, info.st_ino), node.path))
        view[node.path] = (info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, xattrs, *own)
    return view


def _content(node: Node) -> str:
    """Return a digest of what a reader sees; holes are skipped unread and count as the zeros they show."""
    digest = hashlib.sha256()
    block = 1 << 20
    zeros = bytes(block)
    fd = os.open(node.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=node.fd)
    try:
        offset = 0
        while offset < node.stat.st_size:
            offset = os.lseek(fd, offset, os.SEEK_DATA) // block * block
            data = os.pread(fd, block, offset)
            if data != zeros[: len(data)]:
                digest.update(b"%d:" % offset + data)
            offset += block
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
    finally:
        os.close(fd)
    return digest.hexdigest()
