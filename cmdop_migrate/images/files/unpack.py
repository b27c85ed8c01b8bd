"""Re-create a file layer from its table and chunks.

Everything is created relative to an open directory, exclusively and without following symlinks, in a directory that was
empty: nothing outside it can be reached and nothing inside it replaced. Until its owner and mode are set, last, a file
is readable by root only. On any failure the caller deletes the target.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from cmdop_migrate.clock import walltime
from cmdop_migrate.errors import Blocked, CmdopError, ImageRefused, Unexpected
from cmdop_migrate.images.files.capture import ChunkSource
from cmdop_migrate.images.files.file_table import (
    BLOCK,
    CHAR,
    DIRECTORY,
    FIFO,
    FILE,
    HARDLINK,
    SOCKET,
    SYMLINK,
    WHITEOUT,
    Entry,
    FileTable,
    Xattrs,
)
from cmdop_migrate.images.files.stat_cache import Stat, Stats, settled, stat_of
from cmdop_migrate.images.files.walk import Cursor

_READ_AHEAD = 8
_HELD = 24
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NODES = {FIFO: stat.S_IFIFO, SOCKET: stat.S_IFSOCK, WHITEOUT: stat.S_IFCHR, CHAR: stat.S_IFCHR, BLOCK: stat.S_IFBLK}


def restore(
    table: FileTable, source: ChunkSource, target: Path, *, allow_devices: bool = False, readers: int = 4
) -> Stats:
    """Fill the empty directory `target`, and return the stats that make its next capture cheap.

    Device nodes are created if harmless (null, zero, full, random, urandom, tty, ptmx: every session's /dev has them).
    Any other gives access to hardware of the host; unless `allow_devices`, an image with one is refused before anything
    is created. Whiteouts do not count as devices.
    """
    if table.live:
        raise ImageRefused("this file table was taken from a running session", "Restore a finished checkpoint.")
    if not allow_devices and table.devices:
        names = ", ".join(os.fsdecode(path) for path in table.devices[:3])
        raise ImageRefused(
            f"the session's files contain device nodes of the host: {names}",
            "If you trust this image: cmdop-migrate restore --allow-devices",
        )
    try:
        cursor = Cursor(target)
        links = Cursor(target)
    except OSError as error:
        raise Blocked(f"cannot fill {target}: {error.strerror}", "Restore files into a new directory.") from error
    with closing(cursor), closing(links):
        if os.listdir(cursor.fd):
            raise Blocked(f"{target} is not empty", "Restore files into a new directory.")
        pool = ThreadPoolExecutor(readers, thread_name_prefix="files-restore")
        try:
            return _Maker(table, _ReadAhead(source, table, pool), cursor, links).run()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class _ReadAhead:
    """Return chunks in the order of use, with the next few already requested; hold a bounded number."""

    def __init__(self, source: ChunkSource, table: FileTable, pool: ThreadPoolExecutor) -> None:
        self._source = source
        self._pool = pool
        self._order = self._refs(table)
        self._held: OrderedDict[str, Future[bytes]] = OrderedDict()
        self._current = ""
        self._waiting = 0

    def get(self, ref: str) -> bytes:
        if ref != self._current:
            self._current = ref
            self._waiting -= 1
            while self._waiting < _READ_AHEAD:
                following = next(self._order, None)
                if following is None:
                    break
                self._waiting += 1
                self._request(following)
        return self._request(ref).result()

    def _request(self, ref: str) -> Future[bytes]:
        if ref not in self._held:
            self._held[ref] = self._pool.submit(self._source.read, ref)
        self._held.move_to_end(ref)
        while len(self._held) > _HELD:
            self._held.popitem(last=False)[1].cancel()
        return self._held[ref]

    @staticmethod
    def _refs(table: FileTable) -> Iterator[str]:
        last = ""
        for entry in table.entries:
            for part in entry.extents:
                if table.chunks[part.chunk] != last:
                    last = table.chunks[part.chunk]
                    yield last


class _Maker:
    """Hold the state of one restore."""

    def __init__(self, table: FileTable, chunks: _ReadAhead, cursor: Cursor, links: Cursor) -> None:
        self._table = table
        self._chunks = chunks
        self._cursor = cursor
        self._links = links
        self._linked = dict.fromkeys((entry.link for entry in table.entries if entry.kind == HARDLINK), b"")
        self._open: list[Entry] = []
        self._stats: list[Stat | None] = []

    def run(self) -> Stats:
        path = b""
        try:
            for path, entry in self._table.paths():
                while len(self._open) > entry.depth:
                    self._finish_directory()
                self._make(path, entry)
            while self._open:
                self._finish_directory()
        except OSError as error:
            raise _explained(path, error) from error
        now = int(walltime() * 1e9)
        return tuple(settled(seen, now) for seen in self._stats)

    def _make(self, path: bytes, entry: Entry) -> None:
        seen = None
        if entry.kind == DIRECTORY:
            if entry.depth:
                os.mkdir(entry.name, 0o700, dir_fd=self._cursor.fd)
                self._cursor.enter(entry.name)
            self._open.append(entry)
        elif entry.kind == FILE:
            seen = self._file(path, entry)
        elif entry.kind == HARDLINK:
            self._link(entry)
        elif entry.kind == SYMLINK:
            self._symlink(entry)
        else:
            self._node(entry)
        if len(self._stats) in self._linked:
            self._linked[len(self._stats)] = path
        self._stats.append(seen)

    def _finish_directory(self) -> None:
        # After its children: a default ACL would be inherited, and each new name updates the mtime.
        entry = self._open.pop()
        _set_metadata(self._cursor.fd, entry)
        if entry.depth:
            self._cursor.leave()

    def _file(self, path: bytes, entry: Entry) -> Stat:
        fd = os.open(entry.name, _NEW, 0o600, dir_fd=self._cursor.fd)
        try:
            end = 0
            for part in entry.extents:
                data = memoryview(self._chunks.get(self._table.chunks[part.chunk]))[part.at : part.at + part.length]
                if len(data) != part.length:
                    raise _short(path)
                end = part.offset
                while data:
                    written = os.pwrite(fd, data, end)
                    data = data[written:]
                    end += written
            if end < entry.size:
                os.ftruncate(fd, entry.size)
            _set_metadata(fd, entry)
            info = os.fstat(fd)
            if info.st_size != entry.size:
                raise _short(path)
            return stat_of(info)
        finally:
            os.close(fd)

    def _link(self, entry: Entry) -> None:
        *directory, name = self._linked[entry.link].split(b"/")
        self._links.go(tuple(directory))
        os.link(name, entry.name, src_dir_fd=self._links.fd, dst_dir_fd=self._cursor.fd, follow_symlinks=False)
        if self._table.entries[entry.link].kind == FILE:  # a new name updates the ctime
            self._stats[entry.link] = stat_of(os.stat(entry.name, dir_fd=self._cursor.fd, follow_symlinks=False))

    def _symlink(self, entry: Entry) -> None:
        here = self._cursor.fd
        os.symlink(entry.target, entry.name, dir_fd=here)
        os.chown(entry.name, entry.uid, entry.gid, dir_fd=here, follow_symlinks=False)
        _set_xattrs(b"/proc/self/fd/%d/%s" % (here, entry.name), entry.xattrs, follow=False)
        os.utime(entry.name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=here, follow_symlinks=False)

    def _node(self, entry: Entry) -> None:
        here = self._cursor.fd
        os.mknod(entry.name, _NODES[entry.kind] | 0o600, os.makedev(*entry.rdev), dir_fd=here)
        # Opening a FIFO would block, and opening a device may trigger it; an O_PATH handle does neither.
        fd = os.open(entry.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
        try:
            handle = b"/proc/self/fd/%d" % fd
            os.chown(handle, entry.uid, entry.gid)
            _set_xattrs(handle, entry.xattrs)
            os.chmod(handle, entry.mode)
            os.utime(handle, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)


def _set_metadata(fd: int, entry: Entry) -> None:
    """Set owner, xattrs, mode and mtime. Owner first: chown drops setuid bits and capabilities. Mode after ACLs, which
    rewrite it."""
    os.fchown(fd, entry.uid, entry.gid)
    _set_xattrs(fd, entry.xattrs)
    os.fchmod(fd, entry.mode)
    os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))


def _set_xattrs(place: int | bytes, xattrs: Xattrs, follow: bool = True) -> None:
    for name, value in xattrs:
        try:
            os.setxattr(place, name, value, follow_symlinks=follow)
        except OSError as error:
            raise Blocked(
                f"the filesystem of this host cannot hold the extended attribute {name}: {error.strerror}",
                "Put the state directory on ext4, xfs or btrfs (setting state_dir).",
            ) from error


def _short(path: bytes) -> ImageRefused:
    return ImageRefused(
        f"{os.fsdecode(path)}: a chunk of it is shorter than the table says",
        "Restore an older checkpoint: `cmdop-migrate checkpoints ls`.",
    )


def _explained(path: bytes, error: OSError) -> CmdopError:
    what = f"cannot re-create {os.fsdecode(path)}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Blocked(what, "Free some space under the state directory, then restore again: the checkpoint is intact.")
    return Unexpected(what, "The checkpoint is intact. Check the disk (`dmesg`), then restore again.")
