"""What the store already has: the chunks of earlier uploads, so that they are not sent again.

An index is a hint, never a promise: a pack counts only when the store has
it and no prune run has doomed it (retention.py says why that is enough). So
a damaged or stale index costs bytes, not correctness.

A store may hold thousands of them. Each is read once by a host, which keeps what it says (ledger.py). Where not all
that are new could be read in the time there is, the next checkpoint goes on from there.
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
from cmdop_migrate.images.store.index_cache import Ledger
from cmdop_migrate.storage.base import ObjectInfo, Store
from cmdop_migrate.util import threads
from cmdop_migrate.util.digest import blake3

MAGIC = b"CMDOPIX1"
PATIENCE = 30.0  # seconds for what other checkpoints left, where this host has not read it yet
READERS, SMALL = 16, 1 << 20  # indexes at a time, of at most so many bytes; larger ones come one by one
LISTED, DIGITS = 2000, "0123456789abcdef"  # packs; a larger store is asked for those of each first digit at once
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
    """Chunks sealed with one key that may be referred to instead of sent: those of the parent, in memory, then those of
    all other uploads, as far as they lie in `usable` packs."""

    def __init__(self, tables: Collection[ChunkTable], ledger: Ledger, usable: Collection[str]) -> None:
        self._tables, self._ledger, self._usable = tables, ledger, usable
        ledger.rely_on(usable)

    def find(self, ident: bytes) -> tuple[str, Place] | None:
        for table in self._tables:
            number = table.find(ident)
            if number >= 0:
                place = table.place(number)
                if (pack := table.packs[place.pack]) in self._usable:
                    return pack, place
        return self._ledger.find(ident)


def usable_packs(store: Store, doomed: Collection[str] | None) -> set[str]:
    """Packs that exist and may be relied on. The caller has read what is `doomed` before, or could not: then none."""
    if doomed is None:
        return set()
    listed = store.few(layout.PACKS, LISTED)
    if listed is None:
        parts = threads.each(lambda digit: list(store.list(layout.PACKS + digit)), DIGITS, len(DIGITS), "packs")
        listed = [info for part in parts for info in part.result()]
    found = (layout.pack_of(info.name) for info in listed)
    return {pack for pack in found if pack is not None and pack not in doomed}


def load_known(
    store: Store,
    ring: KeyRing,
    usable: Collection[str],
    ledger: Ledger,
    first: Mapping[str, ChunkTable] | None = None,
    patience: float = PATIENCE,
) -> Known:
    """What is known under the current key: `first` (the parent's own table), then the indexes, the newest first, then,
    where all of them were read, packs that none names: an upload that was cut off has left them, and was not able to
    leave a last word."""
    first = first or {}
    if usable and _read_new(store, ring, usable, ledger, first, patience):
        strays = set(usable) - ledger.packs() - {pack for table in first.values() for pack in table.packs}
        unread = ledger.unread((layout.pack_name(pack), "") for pack in strays)
        for pack in sorted(pack for pack in strays if layout.pack_name(pack) in unread)[:MOST_STRAYS]:
            ledger.learn(layout.pack_name(pack), "", rebuild(store, ring.current, [pack]))
    return Known(first.values(), ledger, usable)


def _read_new(
    store: Store, ring: KeyRing, usable: Collection[str], ledger: Ledger, known: Collection[str], patience: float
) -> bool:
    """Indexes that were not read before. One names nothing that the table of its checkpoint does not: of those that are
    `known` by theirs, none. False: not all, in the time or the room there was."""
    until = boottime() + patience
    listed = {info.name: info for info in store.list(layout.INDEXES)}
    ledger.forget(lambda name: name not in listed and layout.pack_of(name) not in usable)
    new = ledger.unread((name, _stamp(info)) for name, info in listed.items())
    wanted = [
        listed[name]
        for name in sorted(new, key=lambda name: -listed[name].modified)
        if layout.last_part(name) not in (None, *known) and listed[name].size <= layout.MAX_INDEX
    ]
    small, large = [[info for info in wanted if (info.size > SMALL) == is_large] for is_large in (False, True)]
    for some, most in ((small, READERS), (large, 1)):
        for info, data in zip(
            some, threads.each(lambda info: store.get(info.name), some, most, "indexes"), strict=True
        ):
            try:
                body = data.result(max(0.0, until - boottime()))
            except TimeoutError:
                return False
            except KeyError:
                continue  # pruned since it was listed
            ledger.learn(info.name, _stamp(info), _of_use(info.name, body, ring))
            if ledger.is_broken:
                return False
    return True


def _of_use(name: str, data: bytes, ring: KeyRing) -> ChunkTable:
    try:
        key, table = decode(name.removeprefix(layout.INDEXES), data, ring)
    except ImageRefused as error:
        _logger.warning("not used: %s", error.message)
        return ChunkTable()
    return table if key.fingerprint == ring.current.fingerprint else ChunkTable()


def _stamp(info: ObjectInfo) -> str:
    """Another one when it was written anew."""
    return f"{info.size} {info.modified}"


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
            if packs.sealed_by(tail) not in (None, key.fingerprint):
                _logger.info("pack %s not used: it is of another key", pack[:12])  # as all are after a rotation
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
