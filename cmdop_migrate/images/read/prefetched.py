"""Prefetch packs into a local folder, before it is known whether they are needed, and read them from there.

They are a copy of what the store has, and trusted no more than the store is: every reader verifies the chunks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path

from cmdop_migrate.images.format import layout
from cmdop_migrate.storage.base import Store
from cmdop_migrate.storage.wrapper import StoreWrapper
from cmdop_migrate.util import bulk_io

RESERVE = 256 << 20  # bytes of free disk that prefetching leaves alone


class PrefetchedStore(StoreWrapper):
    """Answer reads of packs from `folder` where it has them, everything else from `inner`."""

    def __init__(self, inner: Store, folder: Path) -> None:
        super().__init__(inner)
        self._folder = folder

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        pack = layout.pack_of(name)
        if pack is not None:
            try:
                with open(self._folder / pack, "rb", buffering=0) as file:
                    size = os.fstat(file.fileno()).st_size
                    return os.pread(file.fileno(), max(0, size - start) if length is None else length, start)
            except FileNotFoundError:
                pass
        return self._inner.get(name, start, length)

    def link(self, name: str, path: Path) -> bool:
        pack = layout.pack_of(name)
        if pack is not None:
            with contextlib.suppress(OSError):
                os.link(self._folder / pack, path)
                return True
        return self._inner.link(name, path)


class PackPrefetcher:
    """Fetch packs into a folder, as long as the disk has room to spare. May be shared between threads."""

    def __init__(self, store: Store, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._store, self._folder = store, folder
        self._lock = threading.Lock()
        self._size = 0

    def bring(self, pack: str) -> bool:
        """Fetch one pack. Return True if it is complete in the folder; False if there is no room or no such pack."""
        name = layout.pack_name(layout.checked_id(pack, "pack id"))
        with self._lock:
            # Twice: a prefetched pack may be copied once more when the restore needs it.
            if shutil.disk_usage(self._folder).free < self._size + 2 * layout.PACK_SIZE + RESERVE:
                return False
            self._size += layout.PACK_SIZE
        try:
            data = self._store.get(name)
        except KeyError:
            return False
        half = self._folder / f"{pack}.half"
        fd = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            bulk_io.write(fd, data, 0)
        finally:
            os.close(fd)
        half.rename(self._folder / pack)
        return True
