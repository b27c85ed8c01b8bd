"""Store objects in a directory: `file:///dir`. One file per object, its path the object's name.

An object is written to `.tmp/`, synced, and only then given its name, so a name never holds a part of an object, no
matter which process is killed when. Several hosts may share the directory over a network file system that has hard
links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.clock import walltime
from cmdop_migrate.errors import StoreDenied, StoreUnreachable
from cmdop_migrate.storage.base import Data, ObjectInfo, Store, check_name, check_prefix, check_range, is_name
from cmdop_migrate.util import bulk_io

TMP = ".tmp"  # no object has this name: segments never begin with a dot
# A crashed writer's file is removed when nothing was written to it for this long. A writer that was stopped for
# longer finds its file gone, fails with StoreUnreachable, and must only retry.
TMP_KEEP = 3600.0
_READ_MOST = 1 << 30  # per call: Linux reads at most 2 GiB - 4 KiB

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_MISUSED = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EFBIG, errno.EXDEV}


class LocalStore(Store):
    """Store objects as files. The directory is created at the first write; until then the store is empty. Files are
    0600."""

    def __init__(self, root: Path) -> None:
        self.url = f"file://{root}"
        self.root = root
        self._tmp = root / TMP
        self._lock = threading.Lock()
        self._linked: set[Path] = set()  # directories whose names are known to be durable
        self._swept = False
        self._seen: tuple[int, int] | None = None  # identity of the root when an object was last found in it

    def put(self, name: str, data: Data) -> None:
        target = self.root / check_name(name)
        with self._failures(f"store {name}"), self._written(data) as temporary:
            self._make_folder(target.parent)
            os.replace(temporary, target)
            _sync_folder(target.parent)

    def put_new(self, name: str, data: Data) -> bool:
        target = self.root / check_name(name)
        with self._failures(f"store {name}"):
            # The look saves a write; the link decides.
            ours = self.stat(name) is None and self._link_new(target, data)
            _sync_folder(target.parent)  # also if another won: False promises that its object is durable
        return ours

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        check_name(name)
        check_range(start, length)
        with self._failures(f"read {name}"):
            try:
                # Another program may have put a FIFO there, on which an open would block forever.
                fd = os.open(self.root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                self._check_root()
                raise KeyError(name) from None
            try:
                self._seen = self._identity()
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode):
                    raise KeyError(name)
                end = info.st_size if length is None else min(start + length, info.st_size)
                return _read_range(fd, start, end)
            finally:
                os.close(fd)

    def stat(self, name: str) -> ObjectInfo | None:
        check_name(name)
        with self._failures(f"look at {name}"):
            try:
                info = os.stat(self.root / name, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                self._check_root()
                return None
            self._seen = self._identity()
        return ObjectInfo(name, info.st_size, info.st_mtime) if stat.S_ISREG(info.st_mode) else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._walk(prefix.rpartition("/")[0], prefix)

    def link(self, name: str, path: Path) -> bool:
        try:
            os.link(self.root / check_name(name), path, follow_symlinks=False)
            if stat.S_ISREG(os.lstat(path).st_mode):
                return True
            path.unlink()  # not an object but a FIFO or a symlink in its place
        except OSError:  # on another disk, or missing: a later read reports it
            pass
        return False

    def delete(self, names: Iterable[str]) -> None:
        checked = [check_name(name) for name in names]
        touched: set[Path] = set()
        for name in checked:
            target = self.root / name
            with self._failures(f"delete {name}"):
                try:
                    target.unlink()
                    touched.add(target.parent)
                except (FileNotFoundError, NotADirectoryError):
                    self._check_root()
        with self._failures("delete objects"):
            for folder in touched:
                _sync_folder(folder)

    def _link_new(self, target: Path, data: Data) -> bool:
        with self._written(data) as temporary:
            self._make_folder(target.parent)
            try:
                os.link(temporary, target)
            except FileExistsError:
                if target.is_dir():
                    raise IsADirectoryError(errno.EISDIR, "a folder has this name") from None
                # Over NFS the answer to our own link may get lost and the request be repeated.
                return os.stat(temporary).st_nlink == 2
        return True

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects below `folder`, in the order of whole names: a folder sorts as its name with the slash."""
        with self._failures(f"list {folder or 'the store'}"):
            try:
                with os.scandir(self.root / folder) as folder_entries:
                    entries = sorted(
                        (entry.name + "/" * entry.is_dir(follow_symlinks=False), entry) for entry in folder_entries
                    )
            except (FileNotFoundError, NotADirectoryError):
                self._check_root()
                return
        for plain, entry in entries:
            name = f"{folder}/{plain}" if folder else plain
            if not is_name(name.removesuffix("/")):
                continue
            if name.endswith("/"):
                if name.startswith(prefix) or prefix.startswith(name):
                    yield from self._walk(name[:-1], prefix)
            elif name.startswith(prefix) and entry.is_file(follow_symlinks=False):
                info = self.stat(name)
                if info is not None:
                    yield info

    def _check_root(self) -> None:
        """Raise OSError if the store's directory was replaced or is not a directory; call it after a miss. An unmounted
        disk leaves an empty directory, or none: its objects are not gone. Nor is a file in place of the directory an
        empty store."""
        if os.path.exists(self.root) and not os.path.isdir(self.root):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a directory")
        if self._seen is not None and self._identity() != self._seen:
            raise OSError(errno.ENODEV, "its directory was replaced: is its disk mounted?")

    def _identity(self) -> tuple[int, int] | None:
        try:
            info = os.stat(self.root)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return info.st_dev, info.st_ino

    @contextlib.contextmanager
    def _written(self, data: Data) -> Iterator[Path]:
        """Write `data`, complete and synced, to a temporary file; delete the file afterwards unless it was renamed."""
        self._make_folder(self._tmp)
        self._seen = self._seen or self._identity()
        self._sweep()
        temporary = self._tmp / os.urandom(16).hex()
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                bulk_io.write(fd, data, 0, cached=len(data) < 1 << 20)
                os.fsync(fd)
            finally:
                os.close(fd)
            yield temporary
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()

    def _make_folder(self, folder: Path) -> None:
        """Create the folder and its parents, each with a durable name, also if another process created it just now."""
        trusted = folder in self._linked or folder == self.root or not folder.is_relative_to(self.root)
        if trusted and folder.is_dir():
            return
        self._check_root()  # else half of an upload would land below a mount point, invisible once it is mounted
        self._make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(folder.parent)
        self._linked.add(folder)

    def _sweep(self) -> None:
        """Remove the files of crashed writers, once per store object."""
        with self._lock:
            if self._swept:
                return
            self._swept = True
        old = walltime() - TMP_KEEP
        for entry in sorted(self._tmp.iterdir()):
            try:
                if entry.lstat().st_mtime < old:
                    entry.unlink()
                    log.get("storage").info("removed %s, left by a crashed writer", entry)
            except FileNotFoundError:
                continue  # another process removed it, or its writer finished
            except OSError as error:  # a leftover file is no reason to fail
                log.get("storage").warning("cannot remove %s, left by a crashed writer: %s", entry, error)

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """Translate errors of the file system into those of the contract."""
        try:
            yield
        except OSError as error:
            reason = f"cannot {what} in {self.url}: {error.strerror or error}"
            if error.errno in _FULL:
                hint = (
                    f"Make room on the file system of {self.root}: `cmdop-migrate checkpoints prune` removes old ones."
                )
                raise StoreDenied(reason, hint) from error
            if error.errno in _FORBIDDEN:
                hint = f"Check the owner and mode of {self.root} and that it is mounted writable, with hard links."
                raise StoreDenied(reason, hint) from error
            if error.errno in _MISUSED:
                hint = f"Another program uses {self.root}: give the store a directory of its own."
                raise StoreDenied(reason, hint) from error
            raise StoreUnreachable(reason, f"Check the disk or mount behind {self.root}, then try again.") from error


def _read_range(fd: int, start: int, end: int) -> bytes:
    parts: list[bytes] = []
    while start < end:
        part = os.pread(fd, min(end - start, _READ_MOST), start)
        if not part:  # objects never shrink: another program truncated it
            raise OSError(errno.EIO, "the file was truncated while it was read")
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a directory, and need not
            raise
    finally:
        os.close(fd)
