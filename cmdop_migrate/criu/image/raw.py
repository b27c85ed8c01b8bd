"""Read and write CRIU's image files without knowing all of their fields.

A file is two magic numbers (u32 each), then records: a u32 length and a
protobuf message. Whoever edits a message passes on every field it does not
know, byte by byte, so that a newer CRIU finds its image as it wrote it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from cmdop_migrate.criu.rpc import Malformed, read_varint, varint

HEAD = 8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def records(image: bytes) -> Iterator[bytes]:
    """Yield the message of each record. Raises Malformed."""
    at = HEAD
    while at < len(image):
        if at + 4 > len(image):
            raise Malformed("an image file of CRIU is cut short")
        (size,) = struct.unpack_from("<I", image, at)
        at += 4 + size
        if at > len(image):
            raise Malformed("an image file of CRIU is cut short")
        yield image[at - size : at]


def with_records(image: bytes, messages: Iterable[bytes]) -> bytes:
    """Return the image with its magic numbers and these messages as its records."""
    made = bytearray(image[:HEAD])
    for message in messages:
        made += struct.pack("<I", len(message)) + message
    return bytes(made)


def fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (field number, the whole field as it is encoded, its content). Raises Malformed."""
    at = 0
    while at < len(message):
        start = at
        tag, at = read_varint(message, at)
        wire = tag & 7
        if wire == _VARINT:
            begin, (_, at) = at, read_varint(message, at)
        elif wire == _BYTES:
            size, begin = read_varint(message, at)
            at = begin + size
        elif wire in (_FIXED64, _FIXED32):
            begin, at = at, at + (8 if wire == _FIXED64 else 4)
        else:
            raise Malformed(f"wire type {wire} in an image file of CRIU")
        if at > len(message):
            raise Malformed("an image file of CRIU is cut short")
        yield tag >> 3, message[start:at], message[begin:at]


def number_field(field: int, value: int) -> bytes:
    """Encode a field that holds a number."""
    return varint(field << 3 | _VARINT) + varint(value)


def bytes_field(field: int, value: bytes) -> bytes:
    """Encode a field that holds bytes or another message."""
    return varint(field << 3 | _BYTES) + varint(len(value)) + value
