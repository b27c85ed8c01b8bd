"""Read every byte of a checkpoint and tell whether it can be restored."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.format import layout, packs
from cmdop_migrate.images.format.chunk_table import ChunkTable
from cmdop_migrate.images.format.codec import Codec
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.format.seal import Sealer
from cmdop_migrate.images.format.windows import PageTable
from cmdop_migrate.images.read.load_table import check_refs, load_table, read_range
from cmdop_migrate.images.store import catalog, index
from cmdop_migrate.storage.base import Store


@dataclass(frozen=True)
class Verified:
    """Report what was read and found intact."""

    manifest: Manifest
    packs: int
    chunks: int
    bytes: int


def verify(store: Store, ring: KeyRing, checkpoint: str, parallel: int = 3) -> Verified:
    """Read all packs of the checkpoint completely, open every chunk in them, and check the tables against each other
    and the index if there is one. Raise ImageRefused at the first part that is not as it was sealed."""
    manifest = catalog.load(store, ring, checkpoint)
    key = ring.get(manifest.key)
    sealer = Sealer(key)
    table = load_table(store, manifest, sealer)
    try:
        index.decode(manifest.checkpoint, store.get(layout.index_name(manifest.checkpoint)), ring)
    except KeyError:
        pass  # the index is only a hint, so it may be missing
    except ImageRefused as error:
        harm = "the checkpoint can still be restored, but its chunks may be uploaded again"
        raise ImageRefused(f"{error.message}; {harm}") from error
    needed: dict[int, set[tuple[bytes, int, int, int]]] = defaultdict(set)
    for ident, pack, offset, length, size in table.rows():
        needed[pack].add((ident, offset, length, size))
    for piece in manifest.table:
        needed[piece.pack].add((piece.ident, piece.offset, piece.length, piece.size))
    with ThreadPoolExecutor(parallel, "verify") as pool:
        sizes = pool.map(lambda n: _pack(store, manifest.packs[n], needed[n], sealer), range(len(manifest.packs)))
        total = sum(sizes)
    _page_tables(store, manifest, table, sealer)
    return Verified(manifest, len(manifest.packs), len(table), total)


def _pack(store: Store, pack: str, needed: set[tuple[bytes, int, int, int]], sealer: Sealer) -> int:
    try:
        data = store.get(layout.pack_name(pack))
    except KeyError:
        raise packs.refused(pack, "it is missing from the store") from None
    rows = packs.read_trailer(pack, data, len(data), sealer)
    if not needed.issubset(rows):
        raise packs.refused(pack, "it does not hold what the checkpoint needs")
    codec, view = Codec(), memoryview(data)
    for ident, offset, length, size in rows:
        sealer.open_chunk(ident, view[offset : offset + length], size, codec)
    return len(data)


def _page_tables(store: Store, manifest: Manifest, table: ChunkTable, sealer: Sealer) -> None:
    codec = Codec()
    for name, blob in manifest.blobs.items():
        if not name.startswith(layout.PAGE_TABLES):
            continue
        body = bytearray()
        for number in blob.chunks:
            place = table.place(number)
            sealed = read_range(store, manifest.packs[place.pack], place.offset, place.length)
            body += sealer.open_chunk(table.ident(number), sealed, place.size, codec)
        check_refs(PageTable.decode(body), table)
