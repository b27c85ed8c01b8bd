"""Authenticated encryption of everything that is stored, bound to what it is and where it belongs.

A sealed thing is  codec (1) | nonce (12) | AES-256-GCM ciphertext and tag.  The
associated data is the format, kind, codec, plain size and the 32-byte id, so a
chunk that was swapped, replayed, relabelled or cut does not open. With random
96-bit nonces one key may seal 2^32 chunks (256 TiB); rotate long before.
"""

from __future__ import annotations

import os
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.format.codec import HINT, RAW, Buffer, Codec
from cmdop_migrate.images.format.keys import MasterKey
from cmdop_migrate.images.format.layout import FORMAT, ID_BYTES
from cmdop_migrate.util.digest import blake3

CHUNK, TRAILER, INDEX, MANIFEST, GROUPS = 1, 2, 3, 4, 5
NONCE = 12
TAG = 16
HEAD = 1 + NONCE
OVERHEAD = HEAD + TAG
_AAD = struct.Struct(f"<14sHBBI{ID_BYTES}s")
_MAGIC = b"cmdop-migrate\0"
_SAME = bytes(NONCE)  # its key seals nothing: the same content must give the same value
_CHANGED = "a sealed part was changed, swapped or damaged"


class Sealer:
    """Seals and opens with one master key. May be shared between threads."""

    def __init__(self, key: MasterKey) -> None:
        self.fingerprint = key.fingerprint
        self._aead = AESGCM(key.seal_key.reveal())
        self._id_key = key.id_key.reveal()
        self._groups = AESGCM(key.derive("groups of windows"))

    def id_of(self, data: Buffer) -> bytes:
        """The chunk id: says nothing about the content to anyone without the key."""
        return blake3(data, key=self._id_key).digest()

    def group_of(self, data: Buffer) -> bytes:
        """Tells whether several chunks are what they were, in half the time that a digest takes: a universal hash
        (GHASH) under a key that nobody else has. Two contents get the same with a chance of 2^-110 for each megabyte,
        as long as no such value is seen outside: keep them sealed. It is no chunk's id."""
        return self._groups.encrypt(_SAME, b"", data)

    def nonces(self, count: int) -> list[bytes]:
        """For as many `seal_into`, at the price of one: each is a call to the kernel."""
        data = os.urandom(NONCE * count)
        return [data[at : at + NONCE] for at in range(0, len(data), NONCE)]

    def seal_into(
        self,
        out: memoryview,
        kind: int,
        ident: bytes,
        codec: int,
        payload: Buffer,
        plain_size: int,
        nonce: bytes | None = None,
    ) -> None:
        """Fill `out`, which is exactly len(payload) + OVERHEAD long. `nonce`: one of `nonces`, for nothing else."""
        nonce = nonce or os.urandom(NONCE)
        out[0] = codec
        out[1:HEAD] = nonce
        self._aead.encrypt_into(nonce, payload, _AAD.pack(_MAGIC, FORMAT, kind, codec, plain_size, ident), out[HEAD:])

    def seal(self, kind: int, ident: bytes, codec: int, payload: Buffer, plain_size: int) -> bytearray:
        out = bytearray(len(payload) + OVERHEAD)
        self.seal_into(memoryview(out), kind, ident, codec, payload, plain_size)
        return out

    def check(self, kind: int, ident: bytes, sealed: Buffer, plain_size: int) -> tuple[int, bytes]:
        """(codec, payload) when every bit is as sealed; else ImageRefused."""
        view = memoryview(sealed)
        if len(view) < OVERHEAD:
            raise ImageRefused("a sealed part is cut short", HINT)
        codec = view[0]
        try:
            payload = self._aead.decrypt(
                view[1:HEAD], view[HEAD:], _AAD.pack(_MAGIC, FORMAT, kind, codec, plain_size, ident)
            )
        except InvalidTag:
            raise ImageRefused(_CHANGED, HINT) from None
        return codec, payload

    def prove(self, ident: bytes, sealed: memoryview, plain_size: int, scratch: memoryview) -> None:
        """As `check` of a chunk, for who does not want what is in it; `scratch` has room for that."""
        if len(sealed) < OVERHEAD:
            raise ImageRefused("a sealed part is cut short", HINT)
        aad = _AAD.pack(_MAGIC, FORMAT, CHUNK, sealed[0], plain_size, ident)
        try:
            self._aead.decrypt_into(sealed[1:HEAD], sealed[HEAD:], aad, scratch[: len(sealed) - OVERHEAD])
        except InvalidTag:
            raise ImageRefused(_CHANGED, HINT) from None

    def open_into(self, out: memoryview, ident: bytes, sealed: Buffer, codec: Codec) -> None:
        """The plaintext of a chunk of just this size: tag and size checked. The tag vouches for the id, which was
        digested before it was sealed, so memory on its way back is not digested once more. What is in `out` after a
        refusal means nothing."""
        view = memoryview(sealed)
        if len(view) == len(out) + OVERHEAD and view[0] == RAW:
            try:
                aad = _AAD.pack(_MAGIC, FORMAT, CHUNK, RAW, len(out), ident)
                self._aead.decrypt_into(view[1:HEAD], view[HEAD:], aad, out)
            except InvalidTag:
                raise ImageRefused(_CHANGED, HINT) from None
        else:
            kind, payload = self.check(CHUNK, ident, sealed, len(out))
            out[:] = codec.unpack(kind, payload, len(out))

    def open_chunk(self, ident: bytes, sealed: Buffer, plain_size: int, codec: Codec) -> Buffer:
        """The plaintext of a chunk: tag, size and digest checked."""
        kind, payload = self.check(CHUNK, ident, sealed, plain_size)
        data = codec.unpack(kind, payload, plain_size)
        if self.id_of(data) != ident:
            raise ImageRefused("a chunk's content does not match its id", HINT)
        return data
