"""Encode and decode protobuf (proto2), for CRIU's RPC messages and for its image files.

CRIU's messages need varints and length-delimited fields only; fixed-width fields are read and written as they are.
A `Message` keeps every field it was parsed from, in order and as encoded, so that fields which are not changed are
written byte for byte: also fields that a newer CRIU added. The protobuf library would need CRIU's schema files for
every image; the tests use it to check this module.

An image file is two magic numbers (u32 each), then records: each a u32 length and one message.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
_FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
HEAD = 8  # bytes of the magic numbers of an image file
_SMALL = [bytes((number,)) for number in range(128)]  # tags and most values are that small
Value = int | bytes


class Malformed(ValueError):
    """Signal bytes that are not a protobuf message, or not an image file of CRIU."""


class Field(NamedTuple):
    """Describe one field of a message: `value` is a number for VARINT and bytes for all other wire types."""

    number: int
    wire: int
    value: Value
    encoded: bytes  # the whole field, with its tag


def varint(number: int) -> bytes:
    """Encode a number in base 128. A negative number is encoded as 64-bit two's complement."""
    if 0 <= number < 128:
        return _SMALL[number]
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number encoded at offset `at` and the offset behind it. Raise Malformed."""
    number = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number & (1 << 64) - 1, at
    raise Malformed("a number is cut short or too long")


def number_field(field: int, value: int) -> bytes:
    """Encode a field that holds a number."""
    return varint(field << 3 | VARINT) + varint(value)


def bytes_field(field: int, value: bytes) -> bytes:
    """Encode a field that holds bytes or another message."""
    return varint(field << 3 | BYTES) + varint(len(value)) + value


def fields(message: bytes) -> Iterator[Field]:
    """Yield the fields of a message in their order. Raise Malformed when a field that is not whole is reached."""
    at = 0
    while at < len(message):
        start = at
        tag, at = read_varint(message, at)
        wire = tag & 7
        value: Value
        if wire == VARINT:
            value, at = read_varint(message, at)
        else:
            if wire == BYTES:
                size, at = read_varint(message, at)
            elif wire in _FIXED_SIZES:
                size = _FIXED_SIZES[wire]
            else:
                raise Malformed(f"field {tag >> 3} has the unknown wire type {wire}")
            value, at = message[at : at + size], at + size
            if at > len(message):
                raise Malformed(f"field {tag >> 3} is cut short")
        yield Field(tag >> 3, wire, value, message[start:at])


def numbers(message: bytes) -> dict[int, int]:
    """Return the fields of a message that holds numbers only. Raise Malformed for any other field.

    A pagemap has one such message for each run of pages: this is twice as fast as `fields`."""
    result, at = {}, 0
    while at < len(message):
        tag, at = read_varint(message, at)
        if tag & 7 != VARINT:
            raise Malformed(f"field {tag >> 3} is not a number")
        result[tag >> 3], at = read_varint(message, at)
    return result


class Message:
    """Hold the fields of one message, to be read and changed by their numbers."""

    def __init__(self, held: Iterable[Field] = ()) -> None:
        self._fields = list(held)

    @classmethod
    def parse(cls, data: bytes) -> Message:
        """Return the message encoded in `data`. Raise Malformed."""
        return cls(fields(data))

    def serialise(self) -> bytes:
        """Return the encoded message; unchanged fields are byte for byte as parsed."""
        return b"".join(field.encoded for field in self._fields)

    def has(self, number: int) -> bool:
        """Tell whether the message has this field."""
        return any(field.number == number for field in self._fields)

    def number(self, number: int, default: int = 0) -> int:
        """Return the number in this field, or `default`. Of a repeated field the last one counts, as in protobuf."""
        for field in reversed(self._fields):
            if field.number == number and isinstance(field.value, int):
                return field.value
        return default

    def content(self, number: int) -> bytes | None:
        """Return the bytes in this field, or None. Of a repeated field the last one counts."""
        for field in reversed(self._fields):
            if field.number == number and isinstance(field.value, bytes):
                return field.value
        return None

    def inner(self, number: int) -> Message | None:
        """Return a copy of the message in this field; write a changed one back with `set`. Raise Malformed."""
        content = self.content(number)
        return None if content is None else Message.parse(content)

    def set(self, number: int, value: int | bytes | Message) -> None:
        """Replace the field where it is, or insert it in the order of the field numbers."""
        raw = value.serialise() if isinstance(value, Message) else value
        made = (
            Field(number, VARINT, raw, number_field(number, raw))
            if isinstance(raw, int)
            else Field(number, BYTES, raw, bytes_field(number, raw))
        )
        present = [field.number for field in self._fields]
        if number in present:
            place = present.index(number)
        else:
            place = next((at for at, other in enumerate(present) if other > number), len(present))
        self.remove(number)
        self._fields.insert(place, made)

    def remove(self, *numbers: int) -> None:
        """Remove these fields, where the message has them."""
        self._fields = [field for field in self._fields if field.number not in numbers]

    def copy(self) -> Message:
        """Return a message with the same fields, to be changed by itself."""
        return Message(self._fields)


def records(image: bytes) -> Iterator[bytes]:
    """Yield the encoded message of each record of an image file. Raise Malformed when a record is cut short."""
    at = HEAD
    while at < len(image):
        size = struct.unpack_from("<I", image, at)[0] if at + 4 <= len(image) else len(image)
        at += 4 + size
        if at > len(image):
            raise Malformed("an image file of CRIU is cut short")
        yield image[at - size : at]


def record(message: bytes) -> bytes:
    """Encode one record of an image file."""
    return struct.pack("<I", len(message)) + message


def with_records(image: bytes, messages: Iterable[bytes]) -> bytes:
    """Return the magic numbers of `image`, followed by these messages as its records."""
    return image[:HEAD] + b"".join(map(record, messages))


def edited(image: bytes, edit: Callable[[Message], None]) -> bytes:
    """Return an image file of which `edit` has changed each record. Raise Malformed."""
    return with_records(image, (_edited(Message.parse(encoded), edit) for encoded in records(image)))


def _edited(message: Message, edit: Callable[[Message], None]) -> bytes:
    edit(message)
    return message.serialise()


def edit_file(path: Path, edit: Callable[[bytes], bytes]) -> None:
    """Replace the content of an image file by what `edit` makes of it, unless that is the same."""
    before = path.read_bytes()
    if (after := edit(before)) != before:
        path.write_bytes(after)


class ImageFile:
    """Hold the records of one image file, to be changed in place and saved."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raise Malformed or FileNotFoundError."""
        data = path.read_bytes()
        self.path, self._head = path, data[:HEAD]
        self.records = [Message.parse(encoded) for encoded in records(data)]

    def save(self) -> None:
        """Replace the file atomically: a reader sees the old records or the new ones."""
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.write_bytes(with_records(self._head, (message.serialise() for message in self.records)))
        os.replace(beside, self.path)
