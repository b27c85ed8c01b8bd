"""A store in a directory: `file:///dir`. One file per object, its path the object's name.

An object is written to `.tmp/`, synced, and only then given its name, so a
name never holds a part of anything, whoever is killed when. Several hosts may
share the directory over a network file system that has hard links.
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
# longer finds its file gone, fails with StoreUnreachable, and loses only a try.
TMP_KEEP = 3600.0
_READ_AT_ONCE = 1 << 30  # Linux gives at most 2 GiB - 4 KiB per read

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_MISUSED = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EFBIG, errno.EXDEV}


class LocalStore(Store):
    """The directory is made at the first write; until then the store is empty. All files are the owner's alone."""

    def __init__(self, root: Path) -> None:
        self.url = f"file://{root}"
        self.root = root
        self._tmp = root / TMP
        self._lock = threading.Lock()
        self._linked: set[Path] = set()  # directories whose own names are known to be on disk
        self._swept = False
        self._seen: tuple[int, int] | None = None  # the directory in which something was found last

    def put(self, name: str, data: Data) -> None:
        target = self.root / check_name(name)
        with self._failures(f"store {name}"), self._written(data) as temporary:
            self._make_folder(target.parent)
            os.replace(temporary, target)
            _sync_folder(target.parent)

    def put_new(self, name: str, data: Data) -> bool:
        target = self.root / check_name(name)
        with self._failures(f"store {name}"):
            # Looking first saves the write; the link is what decides.
            ours = self.stat(name) is None and self._link_new(target, data)
            _sync_folder(target.parent)  # for another's sake too: False says that something is there to stay
        return ours

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        check_name(name)
        check_range(start, length)
        with self._failures(f"read {name}"):
            try:
                # Whoever may write here may have put a pipe there, on which an open would wait for ever.
                fd = os.open(self.root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                self._still_there()
                raise KeyError(name) from None
            try:
                self._seen = self._identity()
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    raise KeyError(name)
                end = found.st_size if length is None else min(start + length, found.st_size)
                return _read_range(fd, start, end)
            finally:
                os.close(fd)

    def stat(self, name: str) -> ObjectInfo | None:
        check_name(name)
        with self._failures(f"look at {name}"):
            try:
                found = os.stat(self.root / name, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                self._still_there()
                return None
            self._seen = self._identity()
        return ObjectInfo(name, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._walk(prefix.rpartition("/")[0], prefix)

    def link(self, name: str, path: Path) -> bool:
        try:
            os.link(self.root / check_name(name), path, follow_symlinks=False)
            if stat.S_ISREG(os.lstat(path).st_mode):
                return True
            path.unlink()  # no object, but a pipe or a symlink in the place of one
        except OSError:  # on another disk, or not there: whoever reads it will be told
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
                    self._still_there()
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
                # Over NFS the answer to our own link may get lost and the question be asked again.
                return os.stat(temporary).st_nlink == 2
        return True

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        """Objects below `folder`, in the order of whole names: a folder sorts as its name with the slash."""
        with self._failures(f"list {folder or 'the store'}"):
            try:
                with os.scandir(self.root / folder) as found:
                    entries = sorted((entry.name + "/" * entry.is_dir(follow_symlinks=False), entry) for entry in found)
            except (FileNotFoundError, NotADirectoryError):
                self._still_there()
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

    def _still_there(self) -> None:
        """For who does not find something. A disk that was unmounted leaves an empty directory, or none: what was on it
        is not gone. Nor is a store that is no directory an empty one."""
        if os.path.exists(self.root) and not os.path.isdir(self.root):
            raise NotADirectoryError(errno.ENOTDIR, "it is no directory")
        if self._seen is not None and self._identity() != self._seen:
            raise OSError(errno.ENODEV, "its directory is not the one it was: is its disk mounted?")

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.root)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino

    @contextlib.contextmanager
    def _written(self, data: Data) -> Iterator[Path]:
        """`data`, whole and synced in a file without a name of its own yet; gone afterwards unless renamed."""
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
        """Make it and what is above it, each with its name on disk: also where another process made it just now."""
        trusted = folder in self._linked or folder == self.root or not folder.is_relative_to(self.root)
        if trusted and folder.is_dir():
            return
        self._still_there()  # else half of an upload would go under a mount point, and be lost from sight
        self._make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(folder.parent)
        self._linked.add(folder)

    def _sweep(self) -> None:
        """Once per store object: remove what crashed writers left."""
        with self._lock:
            if self._swept:
                return
            self._swept = True
        old = walltime() - TMP_KEEP
        for entry in sorted(self._tmp.iterdir()):
            try:
                if entry.lstat().st_mtime < old:
                    entry.unlink()
                    log.get("storage").info("removed %s, left by a writer that crashed", entry)
            except FileNotFoundError:
                continue  # another swept it, or its writer was done
            except OSError as error:  # litter is no reason not to store
                log.get("storage").warning("cannot remove %s, left by a writer that crashed: %s", entry, error)

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """Errors of the file system, as the contract names them."""
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
                hint = f"Something other than this store uses {self.root}: give the store a directory of its own."
                raise StoreDenied(reason, hint) from error
            raise StoreUnreachable(reason, f"Check the disk or mount behind {self.root}, then try again.") from error


def _read_range(fd: int, start: int, end: int) -> bytes:
    parts: list[bytes] = []
    while start < end:
        part = os.pread(fd, min(end - start, _READ_AT_ONCE), start)
        if not part:  # objects never shrink: the file was cut from outside
            raise OSError(errno.EIO, "the file is shorter than it says")
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such thing, and need none
            raise
    finally:
        os.close(fd)
