"""Let address space that is reserved but not used be mapped again, however large it is.

CRIU maps every private mapping writable at first, to fill it, and sets the real protection later. The kernel counts a
writable mapping as memory that may be needed, and refuses one that is larger than all memory and swap together. A
reservation (PROT_NONE: Chromium, Java, Go) was never counted, and may be larger than that; so may be two writable
mappings that the kernel has joined since.

Therefore mm-PID.img is edited before the restore: MAP_NORESERVE is added to the flags with which CRIU maps these. The
edit is made at the restore and not at the dump, so that older checkpoints profit as well. Afterwards the mapping has
`nr` in VmFlags (and the next dump records it): the kernel no longer counts parts of it that are made writable. That has
no other effect, and none at all where vm.overcommit_memory is 2: there the kernel ignores the flag, counts every
writable mapping, and may refuse.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cmdop_migrate.criu.protobuf import (
    Malformed,
    Message,
    bytes_field,
    edit_file,
    fields,
    records,
    with_records,
)

LARGE = 1 << 30  # smaller mappings are counted, as CRIU does it: no host refuses them
_PROT_WRITE, _MAP_NORESERVE, _MAP_HUGETLB = 0x2, 0x4000, 0x40000
# mm_entry, and the vma_entry messages in it
_VMAS, _START, _END, _PROT, _FLAGS, _STATUS = 14, 1, 2, 5, 6, 7
_NEEDED = (_START, _END, _PROT, _FLAGS, _STATUS)
_REGULAR, _FILE_PRIVATE, _ANON_PRIVATE, _AIO_RING, _SHADOW_STACK = 1 << 0, 1 << 6, 1 << 9, 1 << 13, 1 << 15


def unreserve(images: Path) -> None:
    """Edit the memory maps of all processes in this directory of images. Raise Malformed."""
    most = machine_memory() // 2
    for path in sorted(images.glob("mm-*.img")):
        edit_file(path, lambda image: unreserved(image, most))


def unreserved(image: bytes, most: int) -> bytes:
    """Add MAP_NORESERVE to large private mappings that are not writable, and to all private ones above `most` bytes.
    Raise Malformed."""
    return with_records(image, (b"".join(_mm(encoded, most)) for encoded in records(image)))


def machine_memory() -> int:
    """Return the bytes of memory this host has, without swap, which may be removed at any time."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _mm(message: bytes, most: int) -> Iterator[bytes]:
    for number, _, content, encoded in fields(message):
        if number == _VMAS and isinstance(content, bytes) and not 0 <= _size(content) < min(LARGE, most):
            yield bytes_field(_VMAS, _vma(Message.parse(content), most).serialise())
        else:
            yield encoded


def _size(vma: bytes) -> int:
    """Read the length of a mapping from its first two fields; return -1 if these are other fields. The other fields of
    most mappings are not read: a large process tree has a hundred thousand mappings."""
    head = {field.number: field.value for _, field in zip(range(2), fields(vma), strict=False)}
    start, end = head.get(_START), head.get(_END)
    return end - start if isinstance(start, int) and isinstance(end, int) else -1


def _vma(vma: Message, most: int) -> Message:
    if not all(map(vma.has, _NEEDED)):
        raise Malformed("a mapping in an image file of CRIU lacks a field")
    if _needs_noreserve(vma, most):
        vma.set(_FLAGS, vma.number(_FLAGS) | _MAP_NORESERVE)
    return vma


def _needs_noreserve(vma: Message, most: int) -> bool:
    status, flags, size = vma.number(_STATUS), vma.number(_FLAGS), vma.number(_END) - vma.number(_START)
    is_private = status & _REGULAR and status & (_FILE_PRIVATE | _ANON_PRIVATE)
    if not is_private or status & (_AIO_RING | _SHADOW_STACK) or flags & _MAP_HUGETLB:
        return False
    return size > most or (size >= LARGE and not vma.number(_PROT) & _PROT_WRITE)
