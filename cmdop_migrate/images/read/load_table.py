"""Load the chunk table of a checkpoint from the store, and check it against the manifest."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping

from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.chunk_table import ChunkTable
from cmdop_migrate.images.format.codec import HINT, Codec
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.format.seal import Sealer
from cmdop_migrate.images.format.windows import PageTable, pages_refused
from cmdop_migrate.storage.base import ObjectInfo, Store
from cmdop_migrate.util import threads

FEW, PAGE = 4, 1000  # packs; S3 lists at most 1000 objects per request
STATS_AT_A_TIME = 16


def load_table(store: Store, manifest: Manifest, sealer: Sealer) -> ChunkTable:
    """Return the chunk table. Raise ImageRefused if a piece is missing or damaged, or contradicts the manifest."""
    codec = Codec()
    body = bytearray()
    for piece in manifest.table:
        sealed = read_range(store, manifest.packs[piece.pack], piece.offset, piece.length)
        body += sealer.open_chunk(piece.ident, sealed, piece.size, codec)
    try:
        table = ChunkTable.decode(body)
    except ValueError as error:
        raise ImageRefused(f"the chunk table is damaged: {error}", HINT) from error
    if tuple(table.packs) != manifest.packs[: len(table.packs)]:
        raise ImageRefused("the chunk table names other packs than the manifest", HINT)
    for name, blob in manifest.blobs.items():
        if any(number >= len(table) for number in blob.chunks):
            raise ImageRefused(f"{name} refers to a chunk that is not in the image", HINT)
        if sum(table.place(number).size for number in blob.chunks) != blob.size:
            raise ImageRefused(f"{name} is longer or shorter than the manifest says", HINT)
    return table


def read_range(store: Store, pack: str, offset: int, length: int) -> bytes:
    """Return exactly that part of a pack. Raise ImageRefused if the pack is missing or too short."""
    try:
        data = store.get(layout.pack_name(pack), offset, length)
    except KeyError:
        raise ImageRefused(f"pack {pack[:12]} is missing from the store", HINT) from None
    if len(data) != length:
        raise ImageRefused(f"pack {pack[:12]} is cut short", HINT)
    return data


def check_packs(store: Store, needed: Mapping[str, int]) -> None:
    """Raise ImageRefused if a pack is missing, or shorter than what is needed of it. The content is not read."""
    listed = store.few(layout.PACKS, PAGE) if len(needed) > FEW else None
    if listed is not None:  # a small store lists all packs in one request; a large one is asked for each pack
        there = {layout.pack_of(info.name): info for info in listed}
        infos = {pack: there.get(pack) for pack in needed}
    else:
        infos = stat_packs(store, needed)
    for pack, info in infos.items():
        if info is None:
            raise ImageRefused(f"pack {pack[:12]} is missing from the store", HINT)
        if info.size < needed[pack]:
            raise ImageRefused(f"pack {pack[:12]} is cut short", HINT)


def stat_packs(store: Store, packs: Collection[str], most: int = STATS_AT_A_TIME) -> dict[str, ObjectInfo | None]:
    """Return the ObjectInfo of each pack, None where it is missing; send `most` requests at a time."""
    asked = threads.each(lambda pack: store.stat(layout.pack_name(pack)), packs, most, "packs")
    return {pack: info.result() for pack, info in zip(packs, asked, strict=True)}


def check_refs(pages: PageTable, table: ChunkTable) -> None:
    """Raise ImageRefused unless every window refers to a chunk of exactly its size."""
    sizes = array("I", (size for *_, size in table.rows()))
    for refs, size in pages.sized_refs():
        numbers = set(refs)
        numbers.discard(layout.NO_CHUNK)
        if max(numbers, default=-1) >= len(sizes) or any(sizes[number] != size for number in numbers):
            raise pages_refused("a window refers to a chunk that is missing or of another size")
