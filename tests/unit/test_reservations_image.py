"""Check which mappings of a process get MAP_NORESERVE in CRIU's images."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.criu.image.reservations import LARGE, unreserved
from cmdop_migrate.criu.protobuf import HEAD, Malformed, Message, bytes_field, fields, number_field, records

MOST = 16 << 30
NONE, READ, WRITE = 0, 1, 3
PRIVATE, NORESERVE, HUGETLB = 0x22, 0x4000, 0x40000
ANON, FILE, SHARED, AIO, VDSO = 0x201, 0x41, 0x101, 0x2201, 0x209


def vma(size: int, prot: int, flags: int = PRIVATE, status: int = ANON, *, backwards: bool = False) -> bytes:
    start = 0x7F0000000000
    parts = [number_field(1, start), number_field(2, start + size), number_field(3, 0), number_field(4, 9)]
    parts += [number_field(5, prot), number_field(6, flags), number_field(7, status), number_field(8, 1)]
    parts += [bytes_field(99, b"of a newer CRIU")]
    return b"".join(reversed(parts) if backwards else parts)


def image(*mappings: bytes) -> bytes:
    message = number_field(1, 0x400000) + b"".join(number_field(13, 1 << 60) for _ in range(3))
    message += b"".join(bytes_field(14, one) for one in mappings) + number_field(15, 1)
    return b"\x19\x43\x56\x54\x10\x82\x49\x57" + struct.pack("<I", len(message)) + message


def flags(data: bytes) -> list[int]:
    (message,) = records(data)
    return [Message.parse(field.value).number(6) for field in fields(message) if isinstance(field.value, bytes)]


@pytest.mark.parametrize(
    ("mapping", "added"),
    [
        (vma(40 << 30, NONE), True),
        (vma(40 << 30, READ), True),
        (vma(40 << 30, READ, 2, FILE), True),
        (vma(40 << 30, WRITE), True),
        (vma(LARGE, NONE), True),
        (vma(LARGE, NONE, backwards=True), True),
        (vma(LARGE - 4096, NONE), False),
        (vma(MOST, WRITE), False),
        (vma(40 << 30, NONE, 1, SHARED), False),
        (vma(40 << 30, NONE, PRIVATE | HUGETLB), False),
        (vma(LARGE, NONE, PRIVATE, AIO), False),
        (vma(8192, READ, PRIVATE, VDSO), False),
    ],
)
def test_noreserve_is_added_to_large_private_reservations_only(mapping: bytes, added: bool) -> None:
    before = image(vma(8192, WRITE), mapping, vma(4096, NONE))
    after = unreserved(before, MOST)
    assert [one ^ two for one, two in zip(flags(before), flags(after), strict=True)] == [0, NORESERVE * added, 0]
    assert unreserved(after, MOST) == after
    assert added or after == before


def test_only_the_flags_of_a_mapping_change() -> None:
    before = image(vma(LARGE, NONE), vma(8192, WRITE))
    assert unreserved(before, MOST) == image(vma(LARGE, NONE, PRIVATE | NORESERVE), vma(8192, WRITE))


@given(st.binary(max_size=60), st.integers(0, 80))
def test_damaged_image_is_malformed_or_unchanged(data: bytes, cut: int) -> None:
    for one in (image(vma(LARGE, NONE))[: HEAD + cut], image(data), image()[:HEAD] + data):
        try:
            unreserved(one, MOST)
        except Malformed:
            pass
