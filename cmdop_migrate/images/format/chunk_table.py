"""Which chunks there are and where they lie: fixed records in one buffer, found by id.

A Python dict of a million chunks takes some 200 MiB; this takes 60, and what
an image of any size costs in memory is mostly this table.
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
_PLACES, _STARTS = Struct(f"<{ID_BYTES}xIIII"), Struct(f"<Q{RECORD.size - 8}x")  # of all, one after the other
_COUNTS = Struct("<II")


class Place(NamedTuple):
    """Where a sealed chunk lies. `pack` is a number in the pack list beside the table. A tuple: several are made for
    every chunk, and a frozen dataclass takes twice as long."""

    pack: int
    offset: int
    length: int
    size: int


class ChunkTable:
    """Append-only. Not locked: the owner serialises changes."""

    def __init__(self) -> None:
        self.this_host = bytearray()
        self.packs: list[str] = []
        self._pack_numbers: dict[str, int] = {}
        self._slots = array("I", bytes(4 * 1024))  # open addressing; 0 is free, else number + 1

    def __len__(self) -> int:
        return len(self.this_host) // RECORD.size

    def pack_number(self, pack: str) -> int:
        number = self._pack_numbers.get(pack)
        if number is None:
            number = self._pack_numbers[pack] = len(self.packs)
            self.packs.append(pack)
        return number

    def find(self, ident: bytes) -> int:
        """The number of the chunk, or -1."""
        slots, this_host = self._slots, self.this_host
        mask = len(slots) - 1
        at = int.from_bytes(ident[:8], "little") & mask
        while number := slots[at]:
            start = (number - 1) * RECORD.size
            if this_host.startswith(ident, start):
                return number - 1
            at = (at + 1) & mask
        return -1

    def add(self, ident: bytes, place: Place) -> int:
        """Append a chunk that is not there yet; its number."""
        number = len(self)
        if (number + 1) * 3 > len(self._slots) * 2:
            self._grow()
        self.this_host += RECORD.pack(ident, place.pack, place.offset, place.length, place.size)
        self._enter(ident, number)
        return number

    def set_place(self, number: int, place: Place) -> None:
        _PLACE.pack_into(
            self.this_host, number * RECORD.size + ID_BYTES, place.pack, place.offset, place.length, place.size
        )

    def ident(self, number: int) -> bytes:
        start = number * RECORD.size
        return bytes(self.this_host[start : start + ID_BYTES])

    def place(self, number: int) -> Place:
        return Place(*_PLACE.unpack_from(self.this_host, number * RECORD.size + ID_BYTES))

    def row(self, number: int) -> tuple[bytes, int, int, int, int]:
        """(id, pack number, offset, length, size)."""
        return RECORD.unpack_from(self.this_host, number * RECORD.size)

    def rows(self) -> Iterator[tuple[bytes, int, int, int, int]]:
        """Of all, in order."""
        return RECORD.iter_unpack(self.this_host)

    def part(self, numbers: Iterable[int], pack: int) -> bytes:
        """Records of these chunks, all in the pack of that number, for `encode`. Left out: what has no place yet."""
        rows = (self.row(number) for number in numbers if number >= 0)
        return b"".join(RECORD.pack(ident, pack, *place) for ident, _, *place in rows if place[1])

    def encode(self) -> bytes:
        return encode(self.packs, self.this_host)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> ChunkTable:
        """ValueError when it is not a table, points outside of a pack, or names a chunk twice."""
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
        table.this_host += view[start:]
        for pack, offset, length, size in _PLACES.iter_unpack(table.this_host):
            if pack >= packs or length < OVERHEAD or offset + length > PACK_SIZE or not 0 < size <= MAX_CHUNK:
                raise ValueError("a chunk lies outside of any pack")
            if length > size + OVERHEAD:
                raise ValueError("a chunk is larger sealed than raw")
        table._grow()
        return table

    def copy(self) -> ChunkTable:
        """Another one with the same content."""
        made = ChunkTable()
        made.this_host, made.packs = self.this_host[:], self.packs[:]
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
        """Room for as many again. ValueError when a chunk is there twice."""
        count, this_host = len(self), self.this_host
        size = 1024
        while size < count * 2:
            size *= 2
        slots, mask = array("I", bytes(4 * size)), size - 1
        for number, (start,) in enumerate(_STARTS.iter_unpack(this_host), 1):
            at = start & mask
            while other := slots[at]:
                ident = this_host[(number - 1) * RECORD.size : (number - 1) * RECORD.size + ID_BYTES]
                if this_host.startswith(ident, (other - 1) * RECORD.size):
                    raise ValueError("a chunk is named twice")
                at = (at + 1) & mask
            slots[at] = number
        self._slots = slots


def encode(packs: Sequence[str], this_host: bytes | bytearray) -> bytes:
    """A table, as `ChunkTable.decode` reads it."""
    return _COUNTS.pack(len(packs), len(this_host) // RECORD.size) + bytes.fromhex("".join(packs)) + this_host
