"""Read, change and write CRIU's image files without knowing all of their fields.

An image is two magic numbers, then records: each a u32 length and a protobuf
message. A `Message` keeps every field it was read with, in order, so that what
is not changed is written back byte for byte, also fields of a newer CRIU.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from cmdop_migrate.criu.rpc import Malformed, read_varint, varint

_HEAD = 8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
Value = int | bytes


class Message:
    """The fields of one protobuf message; numbers as read, byte strings for everything that has a length."""

    def __init__(self, fields: Iterable[tuple[int, int, Value]] = ()) -> None:
        self._fields = list(fields)  # (number, wire type, value)

    @classmethod
    def parse(cls, data: bytes) -> Message:
        """Raises Malformed."""
        return cls(_fields(data))

    def serialise(self) -> bytes:
        out = bytearray()
        for number, wire, value in self._fields:
            out += varint(number << 3 | wire)
            if isinstance(value, int):
                out += varint(value)
            elif wire == _BYTES:
                out += varint(len(value)) + value
            else:
                out += value
        return bytes(out)

    def number(self, field: int, default: int = 0) -> int:
        return next((one for number, _, one in self._fields if number == field and isinstance(one, int)), default)

    def content(self, field: int) -> bytes | None:
        return next((one for number, _, one in self._fields if number == field and isinstance(one, bytes)), None)

    def inner(self, field: int) -> Message | None:
        """A copy of the message in `field`; put it back with `set`."""
        content = self.content(field)
        return None if content is None else Message.parse(content)

    def set(self, field: int, value: int | bytes | Message) -> None:
        """Replace the field, or add it."""
        self.remove(field)
        raw = value.serialise() if isinstance(value, Message) else value
        self._fields.append((field, _VARINT if isinstance(raw, int) else _BYTES, raw))
        self._fields.sort(key=lambda one: one[0])  # stable: repeated fields keep their order

    def remove(self, *fields: int) -> None:
        self._fields = [one for one in self._fields if one[0] not in fields]

    def copy(self) -> Message:
        return Message(self._fields)


class ImageFile:
    """One image file: its records, to be changed in place and saved."""

    def __init__(self, path: Path) -> None:
        """Raises Malformed, FileNotFoundError."""
        data = path.read_bytes()
        self.path, self._head = path, data[:_HEAD]
        self.records = [Message.parse(one) for one in _records(data)]

    def save(self) -> None:
        """Replace the file at once: a reader sees the old records or the new ones."""
        parts = [one.serialise() for one in self.records]
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.write_bytes(self._head + b"".join(struct.pack("<I", len(one)) + one for one in parts))
        os.replace(beside, self.path)


def _records(image: bytes) -> Iterator[bytes]:
    at = _HEAD
    while at < len(image):
        size = struct.unpack_from("<I", image, at)[0] if at + 4 <= len(image) else len(image)
        at += 4 + size
        if at > len(image):
            raise Malformed("an image file of CRIU's is cut short")
        yield image[at - size : at]


def _fields(data: bytes) -> Iterator[tuple[int, int, Value]]:
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        wire, value = tag & 7, b""
        if wire == _VARINT:
            number, at = read_varint(data, at)
            yield tag >> 3, wire, number
            continue
        if wire == _BYTES:
            size, at = read_varint(data, at)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise Malformed(f"wire type {wire} in an image file of CRIU's")
        value, at = data[at : at + size], at + size
        if at > len(data):
            raise Malformed("a record in an image file of CRIU's is cut short")
        yield tag >> 3, wire, value
