"""Find the chunks that the store already has from earlier uploads, so that they are not sent again.

An index is a hint, never a promise: a pack counts only if the store has it and no prune run has marked it for deletion
(prune.py says why that is enough). So a damaged or stale index costs bytes, not correctness.

A store may hold thousands of indexes. Each host reads an index once and caches its content (index_cache.py). If not all
new indexes could be read in the time allowed, the next checkpoint continues.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from cmdop_migrate import log
from cmdop_migrate.clock import boottime
from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.format import layout, packs
from cmdop_migrate.images.format.chunk_table import ChunkTable, Place
from cmdop_migrate.images.format.codec import HINT, RAW
from cmdop_migrate.images.format.keys import KeyRing, MasterKey
from cmdop_migrate.images.format.seal import INDEX, OVERHEAD, Sealer
from cmdop_migrate.images.store.index_cache import IndexCache
from cmdop_migrate.storage.base import ObjectInfo, Store
from cmdop_migrate.util import threads
from cmdop_migrate.util.digest import blake3

MAGIC = b"CMDOPIX1"
INDEX_READ_TIMEOUT = 30.0  # seconds for reading the indexes of other checkpoints that are not cached yet
READERS, SMALL = 16, 1 << 20  # indexes of at most SMALL bytes are read READERS at a time, larger ones one by one
LISTED, DIGITS = (
    2000,
    "0123456789abcdef",
)  # packs; a larger store is listed by first digit, in parallel
MOST_STRAYS = 64  # packs in no index that are read in one checkpoint, with two requests each
_HEAD = len(MAGIC) + layout.FINGERPRINT_BYTES
_logger = log.get("images.index")


def encode(checkpoint: str, table: ChunkTable, sealer: Sealer) -> bytes:
    return seal(checkpoint, table.encode(), sealer)


def seal(checkpoint: str, body: bytes, sealer: Sealer) -> bytes:
    """Seal an index whose table is already encoded."""
    sealed = sealer.seal(INDEX, _bound(checkpoint), RAW, body, len(body))
    return MAGIC + bytes.fromhex(sealer.fingerprint) + sealed


def decode(checkpoint: str, data: bytes, ring: KeyRing) -> tuple[MasterKey, ChunkTable]:
    """Return the key and table of an index. Raise ImageRefused if it is damaged, of another checkpoint, or of an
    unknown key."""
    if len(data) < _HEAD + OVERHEAD or not data.startswith(MAGIC):
        raise ImageRefused(f"the index of {checkpoint[:12]} is not an index of a known format", HINT)
    key = ring.get(data[len(MAGIC) : _HEAD].hex())
    size = len(data) - _HEAD - OVERHEAD
    codec, body = Sealer(key).check(INDEX, _bound(checkpoint), memoryview(data)[_HEAD:], size)
    if codec != RAW:
        raise ImageRefused(f"the index of {checkpoint[:12]} has an unknown compression", HINT)
    try:
        return key, ChunkTable.decode(body)
    except ValueError as error:
        raise ImageRefused(f"the index of {checkpoint[:12]} is damaged: {error}", HINT) from error


class KnownChunks:
    """Find chunks, sealed with one key, that may be referred to instead of sent: those of the parent, in memory, then
    those of all other uploads, as far as they lie in `usable` packs."""

    def __init__(self, tables: Collection[ChunkTable], cache: IndexCache, usable: Collection[str]) -> None:
        self._tables, self._cache, self._usable = tables, cache, usable
        cache.rely_on(usable)

    def find(self, ident: bytes) -> tuple[str, Place] | None:
        for table in self._tables:
            number = table.find(ident)
            if number >= 0:
                place = table.place(number)
                if (pack := table.packs[place.pack]) in self._usable:
                    return pack, place
        return self._cache.find(ident)


def usable_packs(store: Store, marked: Collection[str] | None) -> set[str]:
    """Return the packs that exist and may be relied on. The caller must have read `marked`, the packs marked for
    deletion, before; None means it could not, so no pack is usable."""
    if marked is None:
        return set()
    listed = store.few(layout.PACKS, LISTED)
    if listed is None:
        parts = threads.each(lambda digit: list(store.list(layout.PACKS + digit)), DIGITS, len(DIGITS), "packs")
        listed = [info for part in parts for info in part.result()]
    packs = (layout.pack_of(info.name) for info in listed)
    return {pack for pack in packs if pack is not None and pack not in marked}


def load_known(
    store: Store,
    ring: KeyRing,
    usable: Collection[str],
    cache: IndexCache,
    first: Mapping[str, ChunkTable] | None = None,
    timeout: float = INDEX_READ_TIMEOUT,
) -> KnownChunks:
    """Return the chunks known under the current key: `first` (the parent's own table), then the indexes, newest first.
    If all indexes were read, add packs that no index names: an interrupted upload left them without a final index."""
    first = first or {}
    if usable and _read_new(store, ring, usable, cache, first, timeout):
        strays = set(usable) - cache.packs() - {pack for table in first.values() for pack in table.packs}
        unread = cache.unread((layout.pack_name(pack), "") for pack in strays)
        for pack in sorted(pack for pack in strays if layout.pack_name(pack) in unread)[:MOST_STRAYS]:
            cache.learn(layout.pack_name(pack), "", rebuild(store, ring.current, [pack]))
    return KnownChunks(first.values(), cache, usable)


def _read_new(
    store: Store, ring: KeyRing, usable: Collection[str], cache: IndexCache, known: Collection[str], timeout: float
) -> bool:
    """Cache the indexes not read before, except those of checkpoints in `known`: an index names nothing that the table
    of its checkpoint does not. Return False if not all were read, for lack of time or room."""
    until = boottime() + timeout
    listed = {info.name: info for info in store.list(layout.INDEXES)}
    cache.forget(lambda name: name not in listed and layout.pack_of(name) not in usable)
    new = cache.unread((name, _stamp(info)) for name, info in listed.items())
    to_read = [
        listed[name]
        for name in sorted(new, key=lambda name: -listed[name].modified)
        if layout.last_part(name) not in (None, *known) and listed[name].size <= layout.MAX_INDEX
    ]
    small, large = [[info for info in to_read if (info.size > SMALL) == is_large] for is_large in (False, True)]
    for some, most in ((small, READERS), (large, 1)):
        for info, data in zip(
            some, threads.each(lambda info: store.get(info.name), some, most, "indexes"), strict=True
        ):
            try:
                body = data.result(max(0.0, until - boottime()))
            except TimeoutError:
                return False
            except KeyError:
                continue  # pruned since the listing
            cache.learn(info.name, _stamp(info), _of_use(info.name, body, ring))
            if cache.is_broken:
                return False
    return True


def _of_use(name: str, data: bytes, ring: KeyRing) -> ChunkTable:
    try:
        key, table = decode(name.removeprefix(layout.INDEXES), data, ring)
    except ImageRefused as error:
        _logger.warning("an index is not used: %s", error.message)
        return ChunkTable()
    return table if key.fingerprint == ring.current.fingerprint else ChunkTable()


def _stamp(info: ObjectInfo) -> str:
    """Return a value that changes when the object is rewritten."""
    return f"{info.size} {info.modified}"


def rebuild(store: Store, key: MasterKey, pack_ids: Iterable[str]) -> ChunkTable:
    """Return a table of the chunks in these packs, read from their trailers. Leave out and log packs that are damaged
    or of another key."""
    table, sealer = ChunkTable(), Sealer(key)
    for pack in pack_ids:
        try:
            name = layout.pack_name(pack)
            info = store.stat(name)
            if info is None:
                continue
            tail = store.get(name, max(0, info.size - (64 << 10)))
            if packs.sealed_by(tail) not in (None, key.fingerprint):
                _logger.info("pack %s not used: sealed with another key", pack[:12])  # as all are after a rotation
                continue
            need = packs.trailer_length(tail, key.fingerprint)
            if need > len(tail):
                tail = store.get(name, max(0, info.size - need))
            number = table.pack_number(pack)
            for ident, offset, length, size in packs.read_trailer(pack, tail, info.size, sealer):
                if table.find(ident) < 0:
                    table.add(ident, Place(number, offset, length, size))
        except (ImageRefused, KeyError) as error:
            _logger.warning("pack %s not used: %s", pack[:12], error)
    return table


def _bound(checkpoint: str) -> bytes:
    return blake3(checkpoint.encode()).digest()
