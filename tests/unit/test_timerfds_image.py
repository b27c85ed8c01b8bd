"""Check which timers in CRIU's list of open files are changed, and how."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.criu.image.timerfds import corrected
from cmdop_migrate.criu.protobuf import Malformed, varint

HEAD = b"\x19\x43\x56\x54\x38\x31\x30\x56"
REALTIME, MONOTONIC = 0, 1
PIPE = varint(1 << 3) + varint(3)


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def timer(clock: int, flags: int, seconds: int, nanoseconds: int) -> bytes:
    values = {1: 7, 2: 2, 3: b"\x08\x00", 4: clock, 5: 0, 6: flags, 7: seconds, 8: nanoseconds, 9: 3, 10: 0}
    return field(1, 17) + field(2, 7) + field(12, b"".join(field(number, value) for number, value in values.items()))


def image(*entries: bytes) -> bytes:
    return HEAD + b"".join(struct.pack("<I", len(one)) + one for one in entries)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((MONOTONIC, 0, 5, 6), (MONOTONIC, 0, 5, 6)),
        ((MONOTONIC, 1, 0, 0), (MONOTONIC, 0, 0, 0)),
        ((MONOTONIC, 1, 5, 6), (MONOTONIC, 0, 5, 6)),
        ((MONOTONIC, 1, 0, 6), (MONOTONIC, 0, 0, 6)),
        ((REALTIME, 1, 0, 0), (REALTIME, 0, 0, 0)),
        ((REALTIME, 3, 0, 0), (REALTIME, 2, 0, 0)),
        ((REALTIME, 1, 0, 6), (REALTIME, 1, 1, 6)),
        ((REALTIME, 3, 5, 0), (REALTIME, 3, 6, 0)),
        ((REALTIME, 0, 5, 0), (REALTIME, 0, 5, 0)),
    ],
)
def test_restored_timerfd_never_expires_early(
    before: tuple[int, int, int, int], after: tuple[int, int, int, int]
) -> None:
    assert corrected(image(PIPE, timer(*before), PIPE)) == image(PIPE, timer(*after), PIPE)


@given(st.binary(max_size=80))
def test_damaged_image_is_malformed_or_unchanged(data: bytes) -> None:
    try:
        corrected(image(timer(1, 1, 0, 0), field(12, data), data))
    except Malformed:
        pass
