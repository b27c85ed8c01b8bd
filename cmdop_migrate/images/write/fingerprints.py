"""What a megabyte of memory was cut into last time: found by one hash, instead of one digest for each window.

A digest of 64 KiB is so quick that two threads spend more time on waiting for the
interpreter than on digesting, and a frozen session waits for both. So memory that did not
change is recognised by the megabyte; what did is looked at window by window. Equal hashes
mean equal bytes only as long as nobody else knows any of them (seal.py): they never leave
this host unsealed.

A hint, kept on this host beside the session: without it a checkpoint takes longer, and is the same.
It is sealed, and bound to the checkpoint it was made with. It never grows past a limit.
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
from cmdop_migrate.images.format.seal import GROUPS, OVERHEAD, TAG, Sealer
from cmdop_migrate.images.format.windows import Extent, window_count
from cmdop_migrate.util.digest import blake3

GROUP = 1 << 20  # of addresses
LEAST = 4 * WINDOW  # fewer bytes are not worth a digest of their own
MOST = 16 << 10  # groups that are kept: 16 GiB in about 15 MiB
NO_IDENT = bytes(ID_BYTES)  # of a window of zeros
_HEAD = Struct("<II")  # the first byte's place in its window, and how many there are
_KEY = TAG + _HEAD.size
_VERSION = b"2 "  # of the file: what another one wrote does not open
_logger = log.get("images.groups")


class Piece(NamedTuple):
    """What lies one after the other in a buffer, and within one GROUP of addresses."""

    extent: Extent
    slot: int  # of its first window, in the extent's refs
    at: int  # in the buffer
    vaddr: int
    size: int


def pieces(extents: Iterable[Extent]) -> Iterator[Piece]:
    for extent in extents:
        slot, vaddr, end = 0, extent.vaddr, extent.vaddr + extent.size
        while vaddr < end:
            size = min(GROUP - vaddr % GROUP, end - vaddr)
            yield Piece(extent, slot, extent.offset + vaddr - extent.vaddr, vaddr, size)
            slot, vaddr = slot + window_count(vaddr, size), vaddr + size


class Groups:
    """Those of the parent, and those of this checkpoint. May be used from several threads."""

    def __init__(self, sealer: Sealer, most: int = MOST) -> None:
        self._sealer, self._most = sealer, most
        self._before: dict[bytes, bytes] = {}
        self._now: dict[bytes, bytes] = {}

    def __bool__(self) -> bool:
        """Whether anything can be found."""
        return bool(self._before)

    def key(self, data: Buffer, vaddr: int) -> bytes:
        """Says what is there and how it is cut, not where it is."""
        return self._sealer.group_of(data) + _HEAD.pack(vaddr % WINDOW, len(data))

    def find(self, key: bytes) -> list[bytes] | None:
        """The ids of its windows' chunks, in order."""
        found = self._before.get(key)
        return None if found is None else [found[at : at + ID_BYTES] for at in range(0, len(found), ID_BYTES)]

    def keep(self, key: bytes, idents: Sequence[bytes]) -> None:
        if len(self._now) < self._most:
            self._now[key] = b"".join(idents)

    def save(self, path: Path, checkpoint: str) -> None:
        """For the next checkpoint, whose parent this one is."""
        body = b"".join(key + idents for key, idents in self._now.items())
        try:
            path.write_bytes(self._sealer.seal(GROUPS, _bound(checkpoint), RAW, body, len(body)))
        except OSError as error:
            _logger.warning("the next checkpoint will take longer: %s", error)

    def load(self, path: Path, checkpoint: str) -> None:
        """Nothing, unless all of it is as it was saved with that checkpoint."""
        try:
            sealed = path.read_bytes()
            _, body = self._sealer.check(GROUPS, _bound(checkpoint), sealed, len(sealed) - OVERHEAD)
        except (OSError, ImageRefused) as error:
            _logger.debug("no groups: %s", error)
            return
        at = 0
        while at < len(body):
            head, size = _HEAD.unpack_from(body, at + TAG)
            end = at + _KEY + window_count(head, size) * ID_BYTES
            self._before[body[at : at + _KEY]] = body[at + _KEY : end]
            at = end


def _bound(checkpoint: str) -> bytes:
    return blake3(_VERSION + checkpoint.encode()).digest()
