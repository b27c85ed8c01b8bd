"""Change which signals the threads of a dumped session block (core-N.img).

In the one message of such an image: the process (3) with its leader's mask (5), and the thread (5) with its own (6);
bit N - 1 of a mask is signal N.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from pathlib import Path

from cmdop_migrate.criu.image.raw import bytes_field, fields, number_field, records, with_records
from cmdop_migrate.criu.rpc import read_varint

_MASKS = {3: 5, 5: 6}  # field of the message: field of the mask in it
_TRAP = 1 << (signal.SIGTRAP - 1)


def unblock_trap(images: Path, but_for: Collection[int]) -> None:
    """Unblock SIGTRAP for every thread but those in `but_for`, numbered as in the session. Raises Malformed."""
    for path in images.glob("core-*.img"):
        if int(path.stem.partition("-")[2]) not in but_for:
            path.write_bytes(without_trap(path.read_bytes()))


def without_trap(image: bytes) -> bytes:
    """Return a core image with SIGTRAP unblocked. Raises Malformed."""
    return with_records(image, (b"".join(_field(*one) for one in fields(message)) for message in records(image)))


def _field(number: int, field: bytes, value: bytes) -> bytes:
    if number not in _MASKS:
        return field
    kept = bytearray()
    for inner, encoded, content in fields(value):
        if inner == _MASKS[number]:
            encoded = number_field(inner, read_varint(content, 0)[0] & ~_TRAP)
        kept += encoded
    return bytes_field(number, bytes(kept))
