"""Test chunk compression: lossless, and quick on incompressible data."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.images.format.codec import RAW, ZSTD, Codec

SIZE = 64 << 10
TEXT = b"".join(b"%06d a line of a log, much like the one before\n" % number for number in range(1500))[:SIZE]


def test_compressible_chunk_is_compressed_after_an_incompressible_one() -> None:
    codec = Codec()
    random = os.urandom(SIZE)
    assert [codec.pack(one)[0] for one in (TEXT, random, random, TEXT, random, TEXT[:100], TEXT)] == [
        ZSTD, RAW, RAW, ZSTD, RAW, ZSTD, ZSTD,
    ]  # fmt: skip


def test_compressibility_is_sampled_across_the_chunk() -> None:
    codec = Codec()
    codec.pack(os.urandom(SIZE))
    assert codec.pack(os.urandom(4096) + TEXT[4096:])[0] == ZSTD


@given(st.lists(st.tuples(st.booleans(), st.integers(1, SIZE)), min_size=1, max_size=6))
def test_codec_round_trips_any_sequence_of_chunks(parts: list[tuple[bool, int]]) -> None:
    codec = Codec()
    for is_random, size in parts:
        data = os.urandom(size) if is_random else TEXT[:size]
        kind, payload = codec.pack(memoryview(data))
        assert bytes(codec.unpack(kind, bytes(payload), size)) == data
        assert len(payload) <= size
