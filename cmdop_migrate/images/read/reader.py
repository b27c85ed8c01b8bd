"""Read a checkpoint: everything is authenticated before the first byte of it is given out.

`fetch` brings all of it first: once it returns, nothing can be missing any more.
`fetch_lazy` returns as soon as the tables are here; the rest comes when it is asked for, or after `bring_rest`.
Both give an Image; a chunk's tag and size are checked again each time it is
opened, so a changed local file is refused too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cmdop_migrate.errors import ImageRefused, Unreachable
from cmdop_migrate.images.format import layout, manifest
from cmdop_migrate.images.format.chunk_table import ChunkTable
from cmdop_migrate.images.format.codec import HINT, Buffer, Codec
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.format.seal import Sealer
from cmdop_migrate.images.format.windows import PageTable
from cmdop_migrate.images.read.chunk_cache import LINKS, Base, SealedCache
from cmdop_migrate.images.read.load_table import check_refs, load_table
from cmdop_migrate.images.read.page_reader import PageReader
from cmdop_migrate.images.store import catalog, index
from cmdop_migrate.storage.base import Store

CHUNKS_FILE, TABLE_FILE, MANIFEST_FILE = "chunks", "table", "manifest"
SMALL = 4 << 20  # bytes of a blob that is sure to be asked for: CRIU's images, tables of pages and files


class Image:
    """One checkpoint, readable. Close it."""

    def __init__(self, found: Manifest, table: ChunkTable, sealer: Sealer, cache: SealedCache) -> None:
        self.manifest = found
        self.cache = cache
        self._table, self._sealer = table, sealer
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(max(2, os.cpu_count() or 2), "open")

    def chunk(self, number: int) -> Buffer:
        """The plaintext of a chunk."""
        if not 0 <= number < len(self._table):
            raise ImageRefused(f"chunk {number} is not in the image", HINT)
        size = self._table.place(number).size
        return self._sealer.open_chunk(self._table.ident(number), self.cache.sealed(number), size, self._codec())

    def chunk_into(self, number: int, out: memoryview) -> None:
        """The same, into memory of its size; its neighbours will be asked for next."""
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
        """A chunk by its id in hex, as `submit_named` gave it out."""
        try:
            number = self._table.find(bytes.fromhex(ref))
        except ValueError:
            number = -1
        if number < 0:
            raise ImageRefused("the image lacks a chunk that its files need", HINT)
        return bytes(self.chunk(number))

    def blob(self, name: str) -> bytes:
        """A named byte string. KeyError when the image has none of that name."""
        return b"".join(self.chunk(number) for number in self.manifest.blobs[name].chunks)

    @property
    def targets(self) -> list[str]:
        """Whose memory is here: what the pages were fed under."""
        return [
            name.removeprefix(layout.PAGE_TABLES) for name in self.manifest.blobs if name.startswith(layout.PAGE_TABLES)
        ]

    def pages(self, dst: str) -> PageReader:
        """The memory of one target. KeyError when there is none."""
        table = PageTable.decode(self.blob(layout.PAGE_TABLES + dst))
        check_refs(table, self._table)
        return PageReader(table, self.chunk, self.chunk_into, self._pool)

    @property
    def base(self) -> Base:
        """For `fetch`: what is here need not be brought again."""
        return Base(self._table, self.cache)

    def bring_rest(self, parallel: int = 2) -> None:
        """What is still in the store, in the background. Asked for again, it changes nothing."""
        self.cache.start_background(parallel)

    def close(self) -> None:
        is_still = self.cache.stop()
        self._pool.shutdown(wait=is_still, cancel_futures=True)
        self.cache.close()


def fetch(
    store: Store,
    ring: KeyRing,
    checkpoint: Manifest | str,
    local_dir: Path,
    parallel: int = 4,
    base: Image | None = None,
) -> Image:
    """Bring the whole checkpoint, by its id or its manifest as `catalog` gave it out, into `local_dir`, sealed, every
    tag verified. What `base` has is read from there, so it must stay open as long as this; without one, `open_local`
    opens it again."""
    found = checkpoint if isinstance(checkpoint, Manifest) else catalog.load(store, ring, checkpoint)
    sealer = Sealer(ring.get(found.key))
    table = load_table(store, found, sealer)
    local_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache = SealedCache(store, found, table, sealer, local_dir / CHUNKS_FILE, base=base.base if base else None)
    try:
        cache.fill(parallel)
    except BaseException:
        cache.close()
        for left in (local_dir / CHUNKS_FILE, *local_dir.glob(LINKS)):
            left.unlink(missing_ok=True)
        raise
    if base is not None:
        return Image(found, table, sealer, cache)
    _private(local_dir / TABLE_FILE, index.encode(found.checkpoint, table, sealer))
    _private(local_dir / MANIFEST_FILE, store_copy(found, ring))
    return Image(found, table, sealer, cache)


def open_local(ring: KeyRing, local_dir: Path, session: str, checkpoint: str) -> Image:
    """Open what `fetch` left, for example in another process. Trusts the directory no more than the store."""
    try:
        found = manifest.decode(session, checkpoint, (local_dir / MANIFEST_FILE).read_bytes(), ring)
        key, table = index.decode(checkpoint, (local_dir / TABLE_FILE).read_bytes(), ring)
    except OSError as error:
        raise ImageRefused(
            f"the local copy in {local_dir} is not complete: {error}", "Run the restore again."
        ) from error
    if key.fingerprint != found.key or tuple(table.packs) != found.packs[: len(table.packs)]:
        raise ImageRefused("the local copy's table is not that of its manifest", "Run the restore again.")
    sealer = Sealer(key)
    return Image(found, table, sealer, SealedCache(None, found, table, sealer, local_dir / CHUNKS_FILE))


def fetch_lazy(
    store: Store,
    ring: KeyRing,
    checkpoint: Manifest | str,
    local_dir: Path,
    on_stall: Callable[[float, Unreachable | None], None],
) -> Image:
    """An Image whose chunks are still in the store, which has them all: small blobs are brought now, the rest when
    it is asked for; there is room for it here. A store that is away stalls readers, says so through `on_stall`, and is
    asked again until it is back or the image closed."""
    found = checkpoint if isinstance(checkpoint, Manifest) else catalog.load(store, ring, checkpoint)
    sealer = Sealer(ring.get(found.key))
    table = load_table(store, found, sealer)
    local_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache = SealedCache(store, found, table, sealer, local_dir / CHUNKS_FILE, on_stall)
    try:
        cache.check_store()
        cache.reserve()
        first = [blob.chunks for blob in found.blobs.values() if blob.size <= SMALL]
        cache.bring(number for chunks in first for number in chunks)
    except BaseException:
        cache.close()
        raise
    return Image(found, table, sealer, cache)


def read_back(store: Store, ring: KeyRing, found: Manifest, local_dir: Path) -> Image:
    """Open a checkpoint that is in the store, published or not, to look at parts of it: each is brought when it is
    asked for. A store that is away is an error."""
    sealer = Sealer(ring.get(found.key))
    table = load_table(store, found, sealer)
    local_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache = SealedCache(store, found, table, sealer, local_dir / CHUNKS_FILE)
    try:
        cache.check_store()
    except BaseException:
        cache.close()
        raise
    return Image(found, table, sealer, cache)


def store_copy(found: Manifest, ring: KeyRing) -> bytes:
    """The manifest, sealed and signed anew with its own key."""
    return manifest.encode(found, ring.get(found.key))


def _private(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
