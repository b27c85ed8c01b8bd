"""Recognise unchanged memory by one hash per 1 MiB block, instead of one digest per 64 KiB window.

A digest of 64 KiB is so quick that two threads spend more time waiting for the interpreter than digesting, and a frozen
session waits for both. So unchanged memory is recognised by the block; a changed block is digested window by window.
Equal hashes mean equal bytes only as long as no other party knows any of them (images/format/seal.py): they never leave
this host unsealed.

The file is a hint, kept on this host beside the session: without it a checkpoint takes longer and has the same content.
It is sealed, bound to the checkpoint it was made with, and bounded in size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from cmdop_migrate import log
from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.format.codec import RAW, Buffer
from cmdop_migrate.images.format.layout import ID_BYTES, WINDOW
from cmdop_migrate.images.format.seal import FINGERPRINTS, OVERHEAD, TAG, Sealer
from cmdop_migrate.images.format.windows import Extent, window_count
from cmdop_migrate.util.digest import blake3

BLOCK = 1 << 20  # of addresses
LEAST = 4 * WINDOW  # fewer bytes are not worth a fingerprint
MOST = 16 << 10  # blocks that are kept: 16 GiB in about 15 MiB
NO_IDENT = bytes(ID_BYTES)  # of a window of zeros
_HEAD = Struct("<II")  # offset of the first byte in its window, number of bytes
_KEY = TAG + _HEAD.size
_VERSION = b"2 "  # of the file format: a file of another version does not open
_logger = log.get("images.fingerprints")


class Piece(NamedTuple):
    """Locate bytes that are contiguous in a buffer and lie within one BLOCK of addresses."""

    extent: Extent
    slot: int  # of its first window, in the extent's refs
    at: int  # in the buffer
    vaddr: int
    size: int


def pieces(extents: Iterable[Extent]) -> Iterator[Piece]:
    """Cut extents at BLOCK boundaries of the address."""
    for extent in extents:
        slot, vaddr, end = 0, extent.vaddr, extent.vaddr + extent.size
        while vaddr < end:
            size = min(BLOCK - vaddr % BLOCK, end - vaddr)
            yield Piece(extent, slot, extent.offset + vaddr - extent.vaddr, vaddr, size)
            slot, vaddr = slot + window_count(vaddr, size), vaddr + size


class BlockFingerprints:
    """Hold the fingerprints of the parent, to look up, and those of this checkpoint, to save. Thread-safe."""

    def __init__(self, sealer: Sealer, most: int = MOST) -> None:
        self._sealer, self._most = sealer, most
        self._before: dict[bytes, bytes] = {}
        self._now: dict[bytes, bytes] = {}

    def __bool__(self) -> bool:
        """Return True if the parent has any fingerprint to find."""
        return bool(self._before)

    def key(self, data: Buffer, vaddr: int) -> bytes:
        """Return the lookup key: the hash of the content and how windows cut it, independent of its address."""
        return self._sealer.fingerprint_of(data) + _HEAD.pack(vaddr % WINDOW, len(data))

    def find(self, key: bytes) -> list[bytes] | None:
        """Return the ids of the block's chunks in order, or None if the parent had no such block."""
        idents = self._before.get(key)
        return None if idents is None else [idents[at : at + ID_BYTES] for at in range(0, len(idents), ID_BYTES)]

    def keep(self, key: bytes, idents: Sequence[bytes]) -> None:
        """Remember a block of this checkpoint, up to the limit."""
        if len(self._now) < self._most:
            self._now[key] = b"".join(idents)

    def save(self, path: Path, checkpoint: str) -> None:
        """Save the fingerprints of this checkpoint, for the next one whose parent it is. Log a failure."""
        body = b"".join(key + idents for key, idents in self._now.items())
        try:
            path.write_bytes(self._sealer.seal(FINGERPRINTS, _bound(checkpoint), RAW, body, len(body)))
        except OSError as error:
            _logger.warning("cannot save block fingerprints, so the next checkpoint takes longer: %s", error)

    def load(self, path: Path, checkpoint: str) -> None:
        """Load what was saved with that checkpoint; load nothing if the file is missing, damaged or of another."""
        try:
            sealed = path.read_bytes()
            _, body = self._sealer.check(FINGERPRINTS, _bound(checkpoint), sealed, len(sealed) - OVERHEAD)
        except (OSError, ImageRefused) as error:
            _logger.debug("no usable block fingerprints: %s", error)
            return
        at = 0
        while at < len(body):
            head, size = _HEAD.unpack_from(body, at + TAG)
            end = at + _KEY + window_count(head, size) * ID_BYTES
            self._before[body[at : at + _KEY]] = body[at + _KEY : end]
            at = end


def _bound(checkpoint: str) -> bytes:
    return blake3(_VERSION + checkpoint.encode()).digest()
