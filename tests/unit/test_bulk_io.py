"""Buffers that the kernel copies into, and whole reads and writes."""

import ctypes
import os
import tempfile

import pytest

from cmdop_migrate.util import bulk_io


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 16, 8 << 20, 300_000])
def test_a_large_buffer_begins_where_a_page_does(size: int) -> None:
    made = bulk_io.buffer(size)
    assert len(made) == size and made == bytes(size)
    assert ctypes.addressof(ctypes.c_char.from_buffer(made)) % 4096 == 0


def test_a_small_one_has_its_size() -> None:
    assert [len(bulk_io.buffer(size)) for size in (0, 1, 17, 4096)] == [0, 1, 17, 4096]


def test_what_was_written_is_read_back_at_its_place() -> None:
    data = os.urandom(300_000)
    with tempfile.TemporaryFile() as file:
        bulk_io.write(file.fileno(), data, 5_000)
        into = bulk_io.buffer(len(data) + 10)
        assert bulk_io.read(file.fileno(), memoryview(into), 5_000) == len(data)
    assert into[: len(data)] == data
