"""Define packs: some MiB of sealed chunks in one object, because requests cost more than bytes.

    sealed chunk | sealed chunk | … | sealed trailer | trailer's plain size (u32) | key fingerprint (16) | magic (8)

The trailer lists (id, offset, length, plain size) of every chunk. Readers use the manifest's table and never need the
trailer; from it an index can be rebuilt.
"""

from __future__ import annotations

from struct import Struct

from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.format.codec import HINT, RAW
from cmdop_migrate.images.format.layout import FINGERPRINT_BYTES, ID_BYTES, MAX_CHUNK, PACK_SIZE
from cmdop_migrate.images.format.seal import OVERHEAD, TRAILER, Sealer

MAGIC = b"CMDOPPK1"
ENTRY = Struct(f"<{ID_BYTES}sIII")
_FOOT = Struct(f"<I{FINGERPRINT_BYTES}s{len(MAGIC)}s")
TAIL = OVERHEAD + _FOOT.size


class Pack:
    """Hold one pack while it is filled. Space is reserved under the owner's lock, then filled by any thread."""

    def __init__(self, ident: str, buffer: bytearray) -> None:
        self.ident = ident
        self.buffer = buffer
        self.number = -1  # in the owner's pack list
        self.used = 0
        self.unfilled = 0
        self.closed = False
        self.numbers: list[int] = []
        self._entries = bytearray()

    def fits(self, length: int) -> bool:
        return self.used + length + len(self._entries) + ENTRY.size + TAIL <= PACK_SIZE

    def reserve(self, ident: bytes, number: int, length: int, size: int) -> int:
        """Reserve room for a sealed chunk, and return its offset."""
        offset = self.used
        self._entries += ENTRY.pack(ident, offset, length, size)
        self.numbers.append(number)
        self.used += length
        self.unfilled += 1
        return offset

    def finish(self, sealer: Sealer) -> int:
        """Append trailer and foot, and return the pack's length."""
        entries = bytes(self._entries)
        end = self.used + len(entries) + OVERHEAD
        view = memoryview(self.buffer)
        sealer.seal_into(view[self.used : end], TRAILER, _bound(self.ident), RAW, entries, len(entries))
        _FOOT.pack_into(self.buffer, end, len(entries), bytes.fromhex(sealer.fingerprint), MAGIC)
        self.used = end + _FOOT.size
        return self.used


def read_trailer(pack: str, tail: bytes, length: int, sealer: Sealer) -> list[tuple[bytes, int, int, int]]:
    """Return the entries of a pack of `length` bytes from its last bytes. Raise ImageRefused unless they describe the
    whole pack without gap or overlap. `tail` may be too short: ask `trailer_length` first."""
    need = trailer_length(tail, sealer.fingerprint)
    if len(tail) < need or length < need:
        raise refused(pack, "its trailer is cut short")
    size = need - TAIL
    sealed = tail[len(tail) - need : len(tail) - _FOOT.size]
    _, entries = sealer.check(TRAILER, _bound(pack), sealed, size)
    rows: list[tuple[bytes, int, int, int]] = list(ENTRY.iter_unpack(entries))
    at = 0
    for _, offset, sealed_length, plain in rows:
        if offset != at or sealed_length < OVERHEAD or not 0 < plain <= MAX_CHUNK:
            raise refused(pack, "its trailer does not describe it")
        at += sealed_length
    if at + need != length:
        raise refused(pack, "it is longer or shorter than its trailer says")
    return rows


def sealed_by(tail: bytes) -> str | None:
    """Return the key fingerprint in the last bytes of a pack, or None if they are not the end of a pack."""
    if len(tail) < _FOOT.size:
        return None
    _, key, magic = _FOOT.unpack_from(tail, len(tail) - _FOOT.size)
    return key.hex() if magic == MAGIC else None


def trailer_length(tail: bytes, fingerprint: str) -> int:
    """Return how many bytes at the end of the pack are trailer and foot."""
    if len(tail) < _FOOT.size:
        raise ImageRefused("a pack is cut short", HINT)
    size, key, magic = _FOOT.unpack_from(tail, len(tail) - _FOOT.size)
    if magic != MAGIC or key.hex() != fingerprint or size % ENTRY.size or size > PACK_SIZE:
        raise ImageRefused("a pack does not end as a pack of this key should", HINT)
    return int(size) + TAIL


def refused(pack: str, why: str) -> ImageRefused:
    return ImageRefused(f"pack {pack[:12]}: {why}", HINT)


def _bound(pack: str) -> bytes:
    return bytes.fromhex(pack).ljust(ID_BYTES, b"\0")
