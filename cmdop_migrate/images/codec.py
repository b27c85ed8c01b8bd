"""Compression of one chunk: zstd where it shrinks it, raw where it does not.

Level 1, by measurement (docs/decisions/0004): level 3 gains about 1 % on
memory and costs up to twice the time. A codec belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import zstandard

from cmdop_migrate.errors import ImageRefused

Buffer = bytes | bytearray | memoryview
RAW = 0
ZSTD = 1
LEVEL = 1
_WORTH = 16  # a sixteenth saved, or it is not worth a decompression on every restore


class Codec:
    """Compressor and decompressor of one thread."""

    def __init__(self, level: int = LEVEL) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level, write_content_size=False, write_checksum=False)
        self._decompressor = zstandard.ZstdDecompressor()

    def pack(self, data: Buffer) -> tuple[int, Buffer]:
        """(codec, payload). RAW gives `data` itself back, not a copy."""
        packed = self._compressor.compress(data)
        size = len(data)
        if len(packed) < size - size // _WORTH:
            return ZSTD, packed
        return RAW, data

    def pack_many(self, pieces: Sequence[memoryview]) -> list[tuple[int, Buffer]]:
        """`pack` for several at once, outside of the interpreter lock: threads that take and drop that lock for
        each chunk spend more time waiting for it than compressing."""
        if len(pieces) < 2:
            return [self.pack(piece) for piece in pieces]
        packed = self._compressor.multi_compress_to_buffer(list(pieces), threads=1)
        chosen: list[tuple[int, Buffer]] = []
        for at, piece in enumerate(pieces):
            size = len(piece)
            small = packed[at]
            chosen.append((ZSTD, small.tobytes()) if len(small) < size - size // _WORTH else (RAW, piece))
        return chosen

    def unpack(self, codec: int, payload: Buffer, size: int) -> Buffer:
        """Exactly `size` bytes, or ImageRefused; never allocates more than that."""
        if codec == ZSTD:
            try:
                data: Buffer = self._decompressor.decompress(payload, max_output_size=size)
            except zstandard.ZstdError as error:
                raise ImageRefused(f"a chunk does not decompress: {error}", HINT) from error
        elif codec == RAW:
            data = payload
        else:
            raise ImageRefused(f"a chunk has an unknown compression: {codec}", HINT)
        if len(data) != size:
            raise ImageRefused(f"a chunk has {len(data)} bytes where {size} were promised", HINT)
        return data


HINT = "Run: cmdop-migrate checkpoints verify. Restore an older checkpoint if this one is damaged."
