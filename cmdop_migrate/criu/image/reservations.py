"""Let address space that is reserved but not used be mapped again, however large it is.

CRIU maps every private mapping writable at first, to fill it, and sets the real
protection later. The kernel counts a writable mapping as memory that may be
wanted, and refuses one that is larger than all memory and swap together. A
reservation (PROT_NONE: Chromium, Java, Go) was never counted, and may be larger
than that; so may be two writable mappings that the kernel has joined since.

Therefore mm-PID.img is edited before the restore: MAP_NORESERVE is added to the
flags CRIU maps these with. Edited here and not at the dump, images made before
profit as well. Afterwards the mapping has `nr` in VmFlags (and at the next dump
CRIU sees it there): the kernel no longer counts what of it is made writable.
That has no other effect, and none at all where vm.overcommit_memory is 2: there
the kernel ignores the flag, counts every writable mapping, and may refuse.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cmdop_migrate.criu.image.raw import bytes_field, fields, number_field, records, with_records
from cmdop_migrate.criu.rpc import Malformed, read_varint

LARGE = 1 << 30  # what is smaller is counted, as CRIU does it: no machine refuses that
_PROT_WRITE, _MAP_NORESERVE, _MAP_HUGETLB = 0x2, 0x4000, 0x40000
# mm_entry, and the vma_entry messages in it
_VMAS, _START, _END, _PROT, _FLAGS, _STATUS = 14, 1, 2, 5, 6, 7
_NEEDED = (_START, _END, _PROT, _FLAGS, _STATUS)
_REGULAR, _FILE_PRIVATE, _ANON_PRIVATE, _AIO_RING, _SHADOW_STACK = 1 << 0, 1 << 6, 1 << 9, 1 << 13, 1 << 15


def unreserve(images: Path) -> None:
    """Edit the memory maps of all processes in this directory of images. Raises Malformed."""
    most = machine_memory() // 2
    for image in sorted(images.glob("mm-*.img")):
        before = image.read_bytes()
        if (after := unreserved(before, most)) != before:
            image.write_bytes(after)


def unreserved(image: bytes, most: int) -> bytes:
    """Add MAP_NORESERVE to large private mappings that are not writable, and to all private ones above `most` bytes."""
    return with_records(image, (b"".join(_mm(message, most)) for message in records(image)))


def machine_memory() -> int:
    """Return the bytes of memory this host has; swap left out, since it may be taken away any time."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _mm(message: bytes, most: int) -> Iterator[bytes]:
    for number, field, content in fields(message):
        edited = number == _VMAS and not 0 <= _size(content) < min(LARGE, most)
        yield bytes_field(_VMAS, b"".join(_vma(content, most))) if edited else field


def _size(message: bytes) -> int:
    """Read the length of a mapping from its first two fields; -1 where these are others. The rest of most mappings need
    not be read: a large tree has a hundred thousand of them."""
    found = {number: content for _, (number, _, content) in zip(range(2), fields(message), strict=False)}
    if set(found) != {_START, _END}:
        return -1
    return read_varint(found[_END], 0)[0] - read_varint(found[_START], 0)[0]


def _vma(message: bytes, most: int) -> Iterator[bytes]:
    held = {number: read_varint(content, 0)[0] for number, _, content in fields(message) if number in _NEEDED}
    if len(held) < len(_NEEDED):
        raise Malformed("a mapping in an image file of CRIU lacks a field")
    add = _MAP_NORESERVE if _is_wanted(held, most) else 0
    for number, field, _ in fields(message):
        yield number_field(_FLAGS, held[_FLAGS] | add) if number == _FLAGS else field


def _is_wanted(held: dict[int, int], most: int) -> bool:
    status, size = held[_STATUS], held[_END] - held[_START]
    private = status & _REGULAR and status & (_FILE_PRIVATE | _ANON_PRIVATE)
    if not private or status & (_AIO_RING | _SHADOW_STACK) or held[_FLAGS] & _MAP_HUGETLB:
        return False
    return size > most or (size >= LARGE and not held[_PROT] & _PROT_WRITE)
