"""Compress one chunk: zstd where it shrinks it, raw where it does not.

Level 1, by measurement (docs/decisions/0004): on process memory level 3 gives 3 % smaller chunks for 20 % more time. A
codec belongs to one thread.
"""

from __future__ import annotations

import zstandard

from cmdop_migrate.errors import ImageRefused

Buffer = bytes | bytearray | memoryview
RAW = 0
ZSTD = 1
LEVEL = 1
_WORTH = 16  # compress only if it saves a sixteenth: less is not worth a decompression on every restore
_SAMPLES, _SAMPLE = 4, 1024


class Codec:
    """Compress and decompress in one thread."""

    def __init__(self, level: int = LEVEL) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level, write_content_size=False, write_checksum=False)
        self._decompressor = zstandard.ZstdDecompressor()
        self._was_raw = False

    def pack(self, data: Buffer) -> tuple[int, Buffer]:
        """Return (codec, payload). With RAW the payload is `data` itself, not a copy."""
        if self._was_raw and not self._may_shrink(data):
            return RAW, data
        packed = self._compressor.compress(data)
        self._was_raw = not _is_worth(len(packed), len(data))
        return (RAW, data) if self._was_raw else (ZSTD, packed)

    def _may_shrink(self, data: Buffer) -> bool:
        """Guess from samples whether the data compresses. Random bytes come in long stretches, so after one
        incompressible chunk a few samples tell about the next."""
        step = len(data) // _SAMPLES
        if step < 4 * _SAMPLE:
            return True
        sample = b"".join([data[at : at + _SAMPLE] for at in range(0, _SAMPLES * step, step)])
        return _is_worth(len(self._compressor.compress(sample)), len(sample))

    def unpack(self, codec: int, payload: Buffer, size: int) -> Buffer:
        """Return exactly `size` bytes, or raise ImageRefused; never allocate more than that."""
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


def _is_worth(packed: int, size: int) -> bool:
    return packed < size - size // _WORTH


HINT = "Run: cmdop-migrate checkpoints verify. Restore an older checkpoint if this one is damaged."
