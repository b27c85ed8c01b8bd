"""Check the removal of sizes and modes from CRIU's list of open files."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.criu.image.files_image import executables, uncompared
from cmdop_migrate.criu.protobuf import Malformed, varint

HEAD = b"\x19\x43\x56\x54\x38\x31\x30\x56"


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def regular(name: bytes, *, size: int | None, mode: int | None) -> bytes:
    inner = field(1, 5) + field(2, 0) + field(5, b"\x08\x00") + field(6, name) + field(7, 140)
    inner += b"" if size is None else field(8, size)
    inner += b"" if mode is None else field(10, mode)
    return field(1, 1) + field(2, 5) + field(3, inner + field(11, 77))


def image(*entries: bytes) -> bytes:
    return HEAD + b"".join(struct.pack("<I", len(one)) + one for one in entries)


PIPE = field(1, 3) + field(2, 9) + field(8, b"\x08\x01")


def test_size_and_mode_of_named_files_are_removed() -> None:
    log, other = b"/var/log/x", b"/var/log/xy"
    before = image(regular(log, size=21, mode=0o100644), PIPE, regular(other, size=300, mode=0o100600))
    after = image(regular(log, size=None, mode=None), PIPE, regular(other, size=300, mode=0o100600))
    assert uncompared(before, {log}) == after
    assert uncompared(before, set()) == uncompared(before, {b"/var/log"}) == before


def test_executable_files_are_found_by_their_mode() -> None:
    modes = {b"/bin/x": 0o100755, b"/var/log/x": 0o100644, b"/old": None, b"/home/x": 0o100700}
    listed = image(PIPE, *(regular(name, size=1, mode=mode) for name, mode in modes.items()))
    assert executables(listed) == {b"/bin/x", b"/home/x"}


@given(st.binary(max_size=80), st.integers(0, 90))
def test_damaged_image_is_malformed_or_unchanged(data: bytes, cut: int) -> None:
    """Check that no other exception is raised, and the image does not grow."""
    whole = image(regular(b"/a", size=1, mode=2), data)
    for one in (whole[: len(HEAD) + cut], HEAD + data):
        try:
            executables(one)
            assert len(uncompared(one, {b"/a"})) <= max(len(one), len(HEAD))
        except Malformed:
            pass


def test_truncated_image_is_malformed() -> None:
    whole = image(regular(b"/a", size=1, mode=2))
    for end in range(len(HEAD) + 1, len(whole)):
        with pytest.raises(Malformed):
            uncompared(whole[:end], {b"/a"})
