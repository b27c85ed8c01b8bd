"""Chunks digested, compressed and sealed by a process of their own (offspring.py), for one thread that decides which
of them are new."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence

from cmdop_migrate.images.codec import Codec
from cmdop_migrate.images.layout import ID_BYTES, MAX_CHUNK
from cmdop_migrate.images.seal import CHUNK, OVERHEAD, Sealer
from cmdop_migrate.offspring import Offspring

ROOM = MAX_CHUNK  # bytes at a time
MOST = 64  # chunks at a time
_DIGEST, _SEAL = b"d", b"s"


class SealingProcess:
    """What is given to `digest` can be sealed until it is called again."""

    def __init__(self, sealer: Sealer) -> None:
        self._given = memoryview(mmap.mmap(-1, ROOM))
        self._sealed = memoryview(mmap.mmap(-1, ROOM + MOST * OVERHEAD))
        self._work = _Work(sealer, self._given, self._sealed)
        self.process = Offspring(self._work.answer)

    def digest(self, chunks: Sequence[memoryview]) -> list[bytes] | None:
        """Their ids; None: it takes no more, or not so much."""
        if len(chunks) > MOST or sum(map(len, chunks)) > ROOM or not self.process.is_there:
            return None
        at = 0
        for chunk in chunks:
            self._given[at : at + len(chunk)] = chunk
            at += len(chunk)
        said = self.process.ask(_DIGEST + struct.pack(f"<{len(chunks)}I", *map(len, chunks)))
        return [said[at : at + ID_BYTES] for at in range(0, len(said), ID_BYTES)] or None

    def seal(self, which: Sequence[int]) -> list[memoryview] | None:
        """Those of them, by their places in the list, as they are stored; good until the next call. None: gone."""
        said = self.process.ask(_SEAL + bytes(which))
        if not said:
            return None
        sealed, at = [], 0
        for (length,) in struct.iter_unpack("<I", said):
            sealed.append(self._sealed[at : at + length])
            at += length
        return sealed


class _Work:
    """What runs in the process."""

    def __init__(self, sealer: Sealer, given: memoryview, sealed: memoryview) -> None:
        self._sealer, self._given, self._sealed = sealer, given, sealed
        self._codec = Codec()
        self._chunks: list[tuple[bytes, memoryview]] = []

    def answer(self, message: bytes) -> bytes:
        if message[:1] == _DIGEST:
            return self._digest([size for (size,) in struct.iter_unpack("<I", message[1:])])
        return self._seal(message[1:])

    def _digest(self, sizes: Sequence[int]) -> bytes:
        self._chunks, at = [], 0
        for size in sizes:
            chunk = self._given[at : at + size]
            self._chunks.append((self._sealer.id_of(chunk), chunk))
            at += size
        return b"".join(ident for ident, _ in self._chunks)

    def _seal(self, which: bytes) -> bytes:
        lengths, at = [], 0
        for number, nonce in zip(which, self._sealer.nonces(len(which)), strict=True):
            ident, chunk = self._chunks[number]
            codec, payload = self._codec.pack(chunk)
            length = len(payload) + OVERHEAD
            out = self._sealed[at : at + length]
            self._sealer.seal_into(out, CHUNK, ident, codec, payload, len(chunk), nonce)
            lengths.append(length)
            at += length
        return struct.pack(f"<{len(lengths)}I", *lengths)
