"""Record which chunks an image has and where they lie: fixed-size records in one buffer, found by id.

A Python dict of a million chunks takes some 200 MiB; this takes 60. The memory that an image of any size needs is
mostly this table.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from cmdop_migrate.images.format.layout import ID_BYTES, MAX_CHUNK, PACK_ID_BYTES, PACK_SIZE
from cmdop_migrate.images.format.seal import OVERHEAD

RECORD = Struct(f"<{ID_BYTES}sIIII")  # id, pack number, offset, sealed length, plain size
_PLACE = Struct("<IIII")
_PLACES, _STARTS = Struct(f"<{ID_BYTES}xIIII"), Struct(f"<Q{RECORD.size - 8}x")  # to iterate over all records
_COUNTS = Struct("<II")


class Place(NamedTuple):
    """Locate a sealed chunk. `pack` is a number in the pack list beside the table. A tuple, because several are made
    for every chunk, and a frozen dataclass takes twice as long."""

    pack: int
    offset: int
    length: int
    size: int


class ChunkTable:
    """Store chunk records, append-only. Not locked: the owner serialises changes."""

    def __init__(self) -> None:
        self.records = bytearray()
        self.packs: list[str] = []
        self._pack_numbers: dict[str, int] = {}
        self._slots = array("I", bytes(4 * 1024))  # hash table, open addressing; 0 is free, else number + 1

    def __len__(self) -> int:
        return len(self.records) // RECORD.size

    def pack_number(self, pack: str) -> int:
        """Return the number of a pack, adding it to the list if it is new."""
        number = self._pack_numbers.get(pack)
        if number is None:
            number = self._pack_numbers[pack] = len(self.packs)
            self.packs.append(pack)
        return number

    def find(self, ident: bytes) -> int:
        """Return the number of the chunk, or -1."""
        slots, records = self._slots, self.records
        mask = len(slots) - 1
        at = int.from_bytes(ident[:8], "little") & mask
        while number := slots[at]:
            start = (number - 1) * RECORD.size
            if records.startswith(ident, start):
                return number - 1
            at = (at + 1) & mask
        return -1

    def add(self, ident: bytes, place: Place) -> int:
        """Append a chunk that is not in the table yet, and return its number."""
        number = len(self)
        if (number + 1) * 3 > len(self._slots) * 2:
            self._grow()
        self.records += RECORD.pack(ident, place.pack, place.offset, place.length, place.size)
        self._enter(ident, number)
        return number

    def set_place(self, number: int, place: Place) -> None:
        _PLACE.pack_into(
            self.records, number * RECORD.size + ID_BYTES, place.pack, place.offset, place.length, place.size
        )

    def ident(self, number: int) -> bytes:
        start = number * RECORD.size
        return bytes(self.records[start : start + ID_BYTES])

    def place(self, number: int) -> Place:
        return Place(*_PLACE.unpack_from(self.records, number * RECORD.size + ID_BYTES))

    def row(self, number: int) -> tuple[bytes, int, int, int, int]:
        """Return (id, pack number, offset, length, size) of one chunk."""
        return RECORD.unpack_from(self.records, number * RECORD.size)

    def rows(self) -> Iterator[tuple[bytes, int, int, int, int]]:
        """Iterate over the rows of all chunks, in order."""
        return RECORD.iter_unpack(self.records)

    def part(self, numbers: Iterable[int], pack: int) -> bytes:
        """Return the records of these chunks, all in the pack of that number, for `encode`. Leave out chunks that have
        no place yet."""
        rows = (self.row(number) for number in numbers if number >= 0)
        return b"".join(RECORD.pack(ident, pack, *place) for ident, _, *place in rows if place[1])

    def encode(self) -> bytes:
        return encode(self.packs, self.records)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> ChunkTable:
        """Parse a table. Raise ValueError if it is not one, points outside a pack, or names a chunk twice."""
        table = cls()
        view = memoryview(data)
        if len(view) < _COUNTS.size:
            raise ValueError("cut short")
        packs, count = _COUNTS.unpack_from(view)
        start = _COUNTS.size + packs * PACK_ID_BYTES
        if len(view) != start + count * RECORD.size:
            raise ValueError("wrong length")
        for at in range(_COUNTS.size, start, PACK_ID_BYTES):
            table.pack_number(view[at : at + PACK_ID_BYTES].hex())
        if len(table.packs) != packs:
            raise ValueError("a pack is named twice")
        table.records += view[start:]
        for pack, offset, length, size in _PLACES.iter_unpack(table.records):
            if pack >= packs or length < OVERHEAD or offset + length > PACK_SIZE or not 0 < size <= MAX_CHUNK:
                raise ValueError("a chunk lies outside of any pack")
            if length > size + OVERHEAD:
                raise ValueError("a chunk is larger sealed than raw")
        table._grow()
        return table

    def copy(self) -> ChunkTable:
        """Return an independent table with the same content."""
        made = ChunkTable()
        made.records, made.packs = self.records[:], self.packs[:]
        made._pack_numbers, made._slots = self._pack_numbers.copy(), self._slots[:]
        return made

    def _enter(self, ident: bytes, number: int) -> None:
        slots = self._slots
        mask = len(slots) - 1
        at = int.from_bytes(ident[:8], "little") & mask
        while slots[at]:
            at = (at + 1) & mask
        slots[at] = number + 1

    def _grow(self) -> None:
        """Rebuild the hash table with room for as many chunks again. Raise ValueError if a chunk is there twice."""
        count, records = len(self), self.records
        size = 1024
        while size < count * 2:
            size *= 2
        slots, mask = array("I", bytes(4 * size)), size - 1
        for number, (start,) in enumerate(_STARTS.iter_unpack(records), 1):
            at = start & mask
            while other := slots[at]:
                ident = records[(number - 1) * RECORD.size : (number - 1) * RECORD.size + ID_BYTES]
                if records.startswith(ident, (other - 1) * RECORD.size):
                    raise ValueError("a chunk is named twice")
                at = (at + 1) & mask
            slots[at] = number
        self._slots = slots


def encode(packs: Sequence[str], records: bytes | bytearray) -> bytes:
    """Encode a table in the form that `ChunkTable.decode` reads."""
    return _COUNTS.pack(len(packs), len(records) // RECORD.size) + bytes.fromhex("".join(packs)) + records
