"""Read a checkpoint: everything is authenticated before its first byte is returned.

`fetch` downloads all of it first: once it returns, nothing can be missing any more. `fetch_lazy` returns as soon as the
tables are local; the rest is fetched on demand, or prefetched after `bring_rest`. Both return an Image. A chunk's tag
and size are checked again each time it is opened, so a changed local file is refused too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cmdop_migrate.errors import ImageRefused, Unreachable
from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.chunk_table import ChunkTable
from cmdop_migrate.images.format.codec import HINT, Buffer, Codec
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.format.seal import Sealer
from cmdop_migrate.images.format.windows import PageTable
from cmdop_migrate.images.read.chunk_cache import LINKS, BaseImage, ChunkCache
from cmdop_migrate.images.read.load_table import check_refs, load_table
from cmdop_migrate.images.read.page_reader import PageReader
from cmdop_migrate.images.store import catalog
from cmdop_migrate.storage.base import Store

CHUNKS_FILE = "chunks"
SMALL = 4 << 20  # blobs up to this size are always needed: CRIU's images, tables of pages and files


class Image:
    """Give access to the content of one checkpoint. Close it after use."""

    def __init__(self, manifest: Manifest, table: ChunkTable, sealer: Sealer, cache: ChunkCache) -> None:
        self.manifest = manifest
        self.cache = cache
        self._table, self._sealer = table, sealer
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(max(2, os.cpu_count() or 2), "open")

    def chunk(self, number: int) -> Buffer:
        """Return the plaintext of a chunk."""
        if not 0 <= number < len(self._table):
            raise ImageRefused(f"chunk {number} is not in the image", HINT)
        size = self._table.place(number).size
        return self._sealer.open_chunk(self._table.ident(number), self.cache.sealed(number), size, self._codec())

    def chunk_into(self, number: int, out: memoryview) -> None:
        """Decrypt a chunk into memory of its size; the caller reads its neighbours next."""
        if not 0 <= number < len(self._table):
            raise ImageRefused(f"chunk {number} is not in the image", HINT)
        ident, sealed = self.cache.stream(number)
        self._sealer.open_into(out, ident, sealed, self._codec())

    def _codec(self) -> Codec:
        codec: Codec | None = getattr(self._local, "codec", None)
        if codec is None:
            codec = self._local.codec = Codec()
        return codec

    def read(self, ref: str) -> bytes:
        """Return a chunk by its id in hex, as `submit_named` gave it out."""
        try:
            number = self._table.find(bytes.fromhex(ref))
        except ValueError:
            number = -1
        if number < 0:
            raise ImageRefused("the image lacks a chunk that its files need", HINT)
        return bytes(self.chunk(number))

    def blob(self, name: str) -> bytes:
        """Return a named byte string. Raise KeyError if the image has none of that name."""
        return b"".join(self.chunk(number) for number in self.manifest.blobs[name].chunks)

    @property
    def targets(self) -> list[str]:
        """Return the targets whose memory is in the image: the names the pages were fed under."""
        return [
            name.removeprefix(layout.PAGE_TABLES) for name in self.manifest.blobs if name.startswith(layout.PAGE_TABLES)
        ]

    def pages(self, dst: str) -> PageReader:
        """Return a reader of the memory of one target. Raise KeyError if the image lacks it."""
        table = PageTable.decode(self.blob(layout.PAGE_TABLES + dst))
        check_refs(table, self._table)
        return PageReader(table, self.chunk, self.chunk_into, self._pool)

    @property
    def base(self) -> BaseImage:
        """Return this image as the base of another `fetch`: shared chunks are not fetched again."""
        return BaseImage(self._table, self.cache)

    def bring_rest(self, parallel: int = 2) -> None:
        """Prefetch what is still in the store, in the background. Further calls do nothing."""
        self.cache.start_background(parallel)

    def close(self) -> None:
        """Stop fetching and close the local files."""
        is_stopped = self.cache.stop()
        self._pool.shutdown(wait=is_stopped, cancel_futures=True)
        self.cache.close()


def fetch(
    store: Store,
    ring: KeyRing,
    checkpoint: Manifest | str,
    local_dir: Path,
    parallel: int = 4,
    base: Image | None = None,
) -> Image:
    """Fetch the whole checkpoint, given by its id or its manifest, into `local_dir`, sealed, every tag verified. Chunks
    that `base` has are read from there, so `base` must stay open as long as the result."""
    manifest = checkpoint if isinstance(checkpoint, Manifest) else catalog.load(store, ring, checkpoint)
    sealer = Sealer(ring.get(manifest.key))
    table = load_table(store, manifest, sealer)
    local_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache = ChunkCache(store, manifest, table, sealer, local_dir / CHUNKS_FILE, base=base.base if base else None)
    try:
        cache.fill(parallel)
    except BaseException:
        cache.close()
        for left in (local_dir / CHUNKS_FILE, *local_dir.glob(LINKS)):
            left.unlink(missing_ok=True)
        raise
    return Image(manifest, table, sealer, cache)


def fetch_lazy(
    store: Store,
    ring: KeyRing,
    checkpoint: Manifest | str,
    local_dir: Path,
    on_stall: Callable[[float, Unreachable | None], None],
) -> Image:
    """Return an Image whose chunks are still in the store. Check that the store has all of them, reserve local room,
    and fetch small blobs now, the rest on demand. An unreachable store stalls readers, is reported through `on_stall`,
    and is retried until it answers or the image is closed."""
    manifest = checkpoint if isinstance(checkpoint, Manifest) else catalog.load(store, ring, checkpoint)
    sealer = Sealer(ring.get(manifest.key))
    table = load_table(store, manifest, sealer)
    local_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache = ChunkCache(store, manifest, table, sealer, local_dir / CHUNKS_FILE, on_stall)
    try:
        cache.check_store()
        cache.reserve()
        first = [blob.chunks for blob in manifest.blobs.values() if blob.size <= SMALL]
        cache.bring(number for chunks in first for number in chunks)
    except BaseException:
        cache.close()
        raise
    return Image(manifest, table, sealer, cache)


def read_back(store: Store, ring: KeyRing, manifest: Manifest, local_dir: Path) -> Image:
    """Open a checkpoint in the store, published or not, to read parts of it: each part is fetched on demand. An
    unreachable store is an error."""
    sealer = Sealer(ring.get(manifest.key))
    table = load_table(store, manifest, sealer)
    local_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache = ChunkCache(store, manifest, table, sealer, local_dir / CHUNKS_FILE)
    try:
        cache.check_store()
    except BaseException:
        cache.close()
        raise
    return Image(manifest, table, sealer, cache)
