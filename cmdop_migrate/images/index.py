"""What the store already has: the chunks of earlier uploads, so that they are not sent again.

An index is a hint, never a promise: a pack counts only when the store has
it and no prune run has doomed it (retention.py says why that is enough). So
a damaged or stale index costs bytes, not correctness.

A store may hold thousands of them. All that is known of the session itself is
read; of the others, the newest first, as many as can be had in a moment: what
sessions share is mostly what their programs are made of, and the newest have that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future

from blake3 import blake3

from cmdop_migrate import beside, log
from cmdop_migrate.clock import boottime
from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images import layout, packs
from cmdop_migrate.images.codec import HINT, RAW
from cmdop_migrate.images.keys import KeyRing, MasterKey
from cmdop_migrate.images.seal import INDEX, OVERHEAD, Sealer
from cmdop_migrate.images.table import ChunkTable, Place
from cmdop_migrate.images.tables import stat_packs
from cmdop_migrate.storage.base import ObjectInfo, Store

MAGIC = b"CMDOPIX1"
DEFAULT_LIMIT = 512 << 10  # chunks held in memory: 32 GiB of raw content in about 35 MiB
PATIENCE = 1.0  # seconds for what other checkpoints left: whoever is to be frozen soon waits for it
READERS, ASKING = 16, 2  # indexes at a time, and packs for each of them
LISTED = 2000  # packs; what a larger store has of them is asked by name
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

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self.table = ChunkTable()
        self._limit = limit

    @property
    def full(self) -> bool:
        return len(self.table) >= self._limit

    def merge(self, other: ChunkTable, usable: Collection[str]) -> None:
        """Take over what lies in usable packs, up to the limit."""
        if not self.table.packs and len(other) <= self._limit and all(pack in usable for pack in other.packs):
            self.table = other.copy()
            return
        numbers = {n: self.table.pack_number(pack) for n, pack in enumerate(other.packs) if pack in usable}
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


class Usable:
    """Which packs exist and may be relied on. The caller has read what is `doomed` before this looks, or could not:
    then none may be."""

    def __init__(self, store: Store, doomed: Collection[str] | None) -> None:
        self._store, self._doomed = store, doomed or ()
        self.all: set[str] | None = None  # too many to be listed
        listed = () if doomed is None else store.few(layout.PACKS, LISTED)
        if listed is not None:
            found = (layout.pack_of(info.name) for info in listed)
            self.all = {pack for pack in found if pack is not None and pack not in self._doomed}

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return self.all is None or bool(self.all)

    def of(self, packs: Iterable[str], most: int = ASKING) -> set[str]:
        """`most` requests at a time, where there is something to ask."""
        if self.all is not None:
            return self.all.intersection(packs)
        left = [pack for pack in packs if pack not in self._doomed]
        return {pack for pack, info in stat_packs(self._store, left, most).items() if info is not None}


def load_known(
    store: Store,
    ring: KeyRing,
    usable: Usable,
    first: Mapping[str, ChunkTable] | None = None,
    limit: int = DEFAULT_LIMIT,
    patience: float = PATIENCE,
) -> Known:
    """What is known under the current key: `first` (the parent's own table), then the newest indexes, then, where all
    of them were read, packs that none names: an upload that was cut off has left them, and was not able to leave a last
    word."""
    first = first or {}
    known = Known(limit)
    strays = set(usable.all or ())
    for table in first.values():
        known.merge(table, usable.of(table.packs, READERS))
        strays.difference_update(table.packs)
    if not usable:
        return known
    until = boottime() + patience
    for learnt in _newest_first(store, ring, usable, first):
        left = until - boottime()
        if left <= 0 or known.full:
            return known
        try:
            table, there = learnt.result(left)
        except TimeoutError:
            return known
        except KeyError:
            continue  # pruned since it was listed
        except ImageRefused as error:
            _logger.warning("not used: %s", error.message)
            continue
        strays.difference_update(table.packs)
        if there:
            known.merge(table, there)
    if strays and not known.full:
        known.merge(rebuild(store, ring.current, sorted(strays)[:MOST_STRAYS]), strays)
    return known


def _newest_first(
    store: Store, ring: KeyRing, usable: Usable, known: Collection[str]
) -> Iterator[Future[tuple[ChunkTable, set[str]]]]:
    """Indexes, with those of their packs that are of use. An index names nothing that the table of its checkpoint does
    not: of those that are `known` by theirs, none."""

    def is_wanted(info: ObjectInfo) -> bool:
        checkpoint = layout.last_part(info.name)
        return checkpoint is not None and checkpoint not in known and info.size <= layout.MAX_INDEX

    def learn(info: ObjectInfo) -> tuple[ChunkTable, set[str]]:
        key, table = decode(info.name.removeprefix(layout.INDEXES), store.get(info.name), ring)
        return table, usable.of(table.packs) if key.fingerprint == ring.current.fingerprint else set()

    wanted = sorted(filter(is_wanted, store.list(layout.INDEXES)), key=lambda info: -info.modified)
    return beside.each(learn, wanted, READERS, "indexes")


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
