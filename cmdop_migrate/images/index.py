"""What the store already has: the chunks of earlier uploads, so that they are not sent again.

An index is a hint, never a promise: a pack counts only when the store lists
it and no prune run has doomed it (retention.py says why that is enough). So
a damaged or stale index costs bytes, not correctness.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from blake3 import blake3

from cmdop_migrate import log
from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images import layout, packs
from cmdop_migrate.images.codec import HINT, RAW
from cmdop_migrate.images.keys import KeyRing, MasterKey
from cmdop_migrate.images.seal import INDEX, OVERHEAD, Sealer
from cmdop_migrate.images.table import ChunkTable, Place
from cmdop_migrate.storage.base import Store

MAGIC = b"CMDOPIX1"
DEFAULT_LIMIT = 512 << 10  # chunks held in memory: 32 GiB of raw content in about 35 MiB
MOST_STRAYS = 64  # two requests each
_HEAD = len(MAGIC) + layout.FINGERPRINT_BYTES
_logger = log.get("images.index")


def encode(checkpoint: str, table: ChunkTable, sealer: Sealer) -> bytes:
    return seal(checkpoint, table.encode(), sealer)


def seal(checkpoint: str, body: bytes, sealer: Sealer) -> bytes:
    """An index of a table that is encoded already."""
    sealed = sealer.seal(INDEX, _bound(checkpoint), RAW, body, len(body))
    return MAGIC + bytes.fromhex(sealer.fingerprint) + sealed


def decode(checkpoint: str, data: bytes, ring: KeyRing) -> tuple[MasterKey, ChunkTable]:
    """ImageRefused when it is damaged, not the index of this checkpoint, or of a key this host does not have."""
    if len(data) < _HEAD + OVERHEAD or not data.startswith(MAGIC):
        raise ImageRefused(f"the index of {checkpoint[:12]} is no index of a known format", HINT)
    key = ring.get(data[len(MAGIC) : _HEAD].hex())
    size = len(data) - _HEAD - OVERHEAD
    codec, body = Sealer(key).check(INDEX, _bound(checkpoint), memoryview(data)[_HEAD:], size)
    if codec != RAW:
        raise ImageRefused(f"the index of {checkpoint[:12]} has an unknown compression", HINT)
    try:
        return key, ChunkTable.decode(body)
    except ValueError as error:
        raise ImageRefused(f"the index of {checkpoint[:12]} is damaged: {error}", HINT) from error


class Known:
    """Chunks sealed with one key that may be referred to instead of sent."""

    def __init__(self, usable: Collection[str], limit: int = DEFAULT_LIMIT) -> None:
        self.table = ChunkTable()
        self._usable = usable
        self._limit = limit

    @property
    def full(self) -> bool:
        return len(self.table) >= self._limit

    def merge(self, other: ChunkTable) -> None:
        """Take over what lies in usable packs, up to the limit."""
        if not self.table.packs and len(other) <= self._limit and all(pack in self._usable for pack in other.packs):
            self.table = other.copy()
            return
        numbers = {n: self.table.pack_number(pack) for n, pack in enumerate(other.packs) if pack in self._usable}
        for ident, pack, offset, length, size in other.rows():
            if self.full:
                return
            if pack in numbers and self.table.find(ident) < 0:
                self.table.add(ident, Place(numbers[pack], offset, length, size))

    def find(self, ident: bytes) -> tuple[str, Place] | None:
        number = self.table.find(ident)
        if number < 0:
            return None
        place = self.table.place(number)
        return self.table.packs[place.pack], place


def usable_packs(store: Store, doomed: Collection[str]) -> set[str]:
    """All packs that exist and may be relied on. The caller has read `doomed` before this lists."""
    found = (layout.pack_of(info.name) for info in store.list(layout.PACKS))
    return {pack for pack in found if pack is not None and pack not in doomed}


def load_known(
    store: Store,
    ring: KeyRing,
    usable: Collection[str],
    first: Mapping[str, ChunkTable] | None = None,
    limit: int = DEFAULT_LIMIT,
) -> Known:
    """What is known under the current key: `first` (the parent's own table), then the newest indexes, then packs that
    no index names: an upload that was cut off has left them, and was not able to leave a last word."""
    first = first or {}
    known = Known(usable, limit)
    strays = set(usable)
    for table in first.values():
        known.merge(table)
        strays.difference_update(table.packs)
    if not usable:
        return known
    for info in sorted(store.list(layout.INDEXES), key=lambda i: -i.modified):
        checkpoint = layout.last_part(info.name)
        if known.full:
            break
        if checkpoint is None or checkpoint in first or info.size > layout.MAX_INDEX:
            continue  # an index names nothing that the table of its checkpoint does not
        try:
            key, table = decode(checkpoint, store.get(info.name), ring)
        except KeyError:
            continue  # pruned since it was listed
        except ImageRefused as error:
            _logger.warning("not used: %s", error.message)
            continue
        strays.difference_update(table.packs)
        if key.fingerprint == ring.current.fingerprint:
            known.merge(table)
    if strays and not known.full:
        known.merge(rebuild(store, ring.current, sorted(strays)[:MOST_STRAYS]))
    return known


def rebuild(store: Store, key: MasterKey, pack_ids: Iterable[str]) -> ChunkTable:
    """A table of the chunks in these packs, from their own trailers. Packs that are damaged or of another key are
    left out and logged."""
    table, sealer = ChunkTable(), Sealer(key)
    for pack in pack_ids:
        try:
            name = layout.pack_name(pack)
            info = store.stat(name)
            if info is None:
                continue
            tail = store.get(name, max(0, info.size - (64 << 10)))
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
