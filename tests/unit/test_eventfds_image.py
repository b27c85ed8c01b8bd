"""Check the counts of eventfds in CRIU's images."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from cmdop_migrate.criu.image import eventfds
from cmdop_migrate.criu.protobuf import varint

HEAD = b"\x19\x43\x56\x54\x38\x31\x30\x56"


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def write(path: Path, *entries: bytes) -> None:
    path.write_bytes(HEAD + b"".join(struct.pack("<I", len(one)) + one for one in entries))


def eventfd(number: int, count: int) -> bytes:
    return field(1, 7) + field(2, number) + field(8, field(1, number) + field(3, b"") + field(4, count))


def lay_out(images: Path, *counts: int, descriptor: int = 0) -> None:
    """Lay out images of this process, where file N has the Nth count and is open as `descriptor` + N."""
    pid = int(Path("/proc/self/status").read_text().split("NSpid:")[1].splitlines()[0].split()[-1])
    write(images / "files.img", *(eventfd(number, count) for number, count in enumerate(counts)))
    write(images / f"ids-{pid}.img", field(1, 1) + field(2, 5))
    table = [field(1, at) + field(2, 0) + field(3, 7) + field(4, descriptor + at) for at in range(len(counts))]
    write(images / "fdinfo-5.img", *table)


def test_upper_half_of_an_eventfd_count_is_added(tmp_path: Path) -> None:
    fd = os.eventfd(7, os.EFD_NONBLOCK)
    try:
        lay_out(tmp_path, (1 << 40) + 7, descriptor=fd)
        eventfds.complete(tmp_path, [os.getpid()])
        assert os.eventfd_read(fd) == (1 << 40) + 7
    finally:
        os.close(fd)


def test_only_counts_above_32_bits_are_large(tmp_path: Path) -> None:
    lay_out(tmp_path, 0, (1 << 32) - 1, 1 << 32, (1 << 64) - 2)
    assert eventfds.large(tmp_path) == {2: 1 << 32, 3: ((1 << 32) - 1) << 32}


def test_damaged_image_does_not_fail_a_restore(tmp_path: Path) -> None:
    lay_out(tmp_path, 1 << 40)
    (tmp_path / "fdinfo-5.img").write_bytes(HEAD + b"\xff\xff\xff\xff")
    eventfds.complete(tmp_path, [os.getpid()])
    (tmp_path / "files.img").write_bytes(HEAD + b"\xff")
    eventfds.complete(tmp_path, [os.getpid()])
