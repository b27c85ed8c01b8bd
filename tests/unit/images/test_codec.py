"""Compression of chunks: nothing is lost, and little time with what does not shrink."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.images.codec import RAW, ZSTD, Codec

SIZE = 64 << 10
TEXT = b"".join(b"%06d a line of a log, much like the one before\n" % number for number in range(1500))[:SIZE]


def test_what_shrinks_is_packed_also_after_what_does_not() -> None:
    codec = Codec()
    random = os.urandom(SIZE)
    assert [codec.pack(one)[0] for one in (TEXT, random, random, TEXT, random, TEXT[:100], TEXT)] == [
        ZSTD, RAW, RAW, ZSTD, RAW, ZSTD, ZSTD,
    ]  # fmt: skip


def test_a_chunk_is_judged_by_more_than_its_beginning() -> None:
    codec = Codec()
    codec.pack(os.urandom(SIZE))
    assert codec.pack(os.urandom(4096) + TEXT[4096:])[0] == ZSTD


def test_quick_is_larger_and_the_same_to_who_reads_it() -> None:
    codec = Codec()
    (_, small), (kind, large) = codec.pack(TEXT), codec.pack(TEXT, quick=True)
    assert kind == ZSTD and len(small) < len(large) < SIZE / 2
    assert codec.unpack(kind, large, SIZE) == TEXT


@given(st.lists(st.tuples(st.booleans(), st.integers(1, SIZE), st.booleans()), min_size=1, max_size=6))
def test_whatever_came_before_it_comes_back_as_it_was(parts: list[tuple[bool, int, bool]]) -> None:
    codec = Codec()
    for is_random, size, quick in parts:
        data = os.urandom(size) if is_random else TEXT[:size]
        kind, payload = codec.pack(memoryview(data), quick)
        assert bytes(codec.unpack(kind, bytes(payload), size)) == data
        assert len(payload) <= size
