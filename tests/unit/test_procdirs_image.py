"""Check the names of /proc/PID directories in CRIU's list of open files."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.criu.image.proc_directories import corrected
from cmdop_migrate.criu.protobuf import Malformed, varint

HEAD = b"\x19\x43\x56\x54\x38\x31\x30\x56"
DIRECTORY, FILE = 0o40555, 0o100444


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def image(*files: tuple[bytes, int]) -> bytes:
    entries = [field(1, 1) + field(3, field(1, 5) + field(6, name) + field(10, mode)) for name, mode in files]
    return HEAD + b"".join(struct.pack("<I", len(one)) + one for one in entries)


@pytest.mark.parametrize(
    ("name", "mode", "links", "wanted"),
    [
        (b"/proc/8/\x10", DIRECTORY, {b"/proc/8"}, b"/proc/8"),
        (b"/proc/8/", DIRECTORY, {b"/proc/8"}, b"/proc/8"),
        (b"/proc/8/the/rest\n", DIRECTORY, {b"/proc/8"}, b"/proc/8"),
        (b"/proc/8/fd", DIRECTORY, {b"/proc/8", b"/proc/8/fd"}, b"/proc/8/fd"),
        (b"/proc/8/task", DIRECTORY, {b"/proc/9"}, b"/proc/8/task"),
        (b"/proc/8/status", FILE, {b"/proc/8"}, b"/proc/8/status"),
        (b"/proc/sys/net", DIRECTORY, {b"/proc/8"}, b"/proc/sys/net"),
        (b"/home/proc/8/x", DIRECTORY, {b"/proc/8"}, b"/home/proc/8/x"),
    ],
)
def test_proc_directory_gets_its_own_name(name: bytes, mode: int, links: set[bytes], wanted: bytes) -> None:
    other = (b"/etc/passwd", FILE)
    assert corrected(image(other, (name, mode)), links) == image(other, (wanted, mode))


@given(st.binary(max_size=80))
def test_damaged_image_is_malformed_or_unchanged(data: bytes) -> None:
    try:
        corrected(image((b"/proc/8/x", DIRECTORY)) + data, {b"/proc/8"})
    except Malformed:
        pass
