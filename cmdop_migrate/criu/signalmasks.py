"""Change which signals the threads of a dumped session block (core-N.img).

An image is two magic numbers, a u32 length and a protobuf message. In the message: the process (3) with its leader's
mask (5), and the thread (5) with its own (6); bit N - 1 of a mask is signal N.
"""

from __future__ import annotations

import signal
import struct
from collections.abc import Collection
from pathlib import Path

from cmdop_migrate.criu.imagefile import fields, records
from cmdop_migrate.criu.messages import read_varint, varint

_HEAD = 8
_MASKS = {3: 5, 5: 6}  # field of the message: field of the mask in it
_TRAP = 1 << (signal.SIGTRAP - 1)


def unblock_trap(images: Path, but_for: Collection[int]) -> None:
    """Unblock SIGTRAP for every thread but those in `but_for`, numbered as in the session. Raises Malformed."""
    for path in images.glob("core-*.img"):
        if int(path.stem.partition("-")[2]) not in but_for:
            before = path.read_bytes()
            path.write_bytes(without_trap(before))


def without_trap(image: bytes) -> bytes:
    made = bytearray(image[:_HEAD])
    for message in records(image):
        entry = b"".join(_field(number, field, value) for number, field, value in fields(message))
        made += struct.pack("<I", len(entry)) + entry
    return bytes(made)


def _field(number: int, field: bytes, value: bytes) -> bytes:
    if number not in _MASKS:
        return field
    kept = bytearray()
    for inner, encoded, content in fields(value):
        if inner == _MASKS[number]:
            encoded = varint(inner << 3) + varint(read_varint(content, 0)[0] & ~_TRAP)
        kept += encoded
    return varint(number << 3 | 2) + varint(len(kept)) + bytes(kept)
