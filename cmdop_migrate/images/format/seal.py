"""Encrypt and authenticate everything that is stored, bound to what it is and where it belongs.

A sealed part is  codec (1) | nonce (12) | AES-256-GCM ciphertext and tag.  The associated data is the format, kind,
codec, plain size and the 32-byte id, so a chunk that was swapped, replayed, relabelled or cut does not open. With
random 96-bit nonces one key may seal 2^32 chunks (256 TiB); rotate long before that.
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

CHUNK, TRAILER, INDEX, MANIFEST, FINGERPRINTS = 1, 2, 3, 4, 5
NONCE = 12
TAG = 16
HEAD = 1 + NONCE
OVERHEAD = HEAD + TAG
_AAD = struct.Struct(f"<14sHBBI{ID_BYTES}s")
_MAGIC = b"cmdop-migrate\0"
_FIXED = bytes(NONCE)  # for fingerprints only, whose key seals nothing: equal content must give an equal value
_CHANGED = "a sealed part was changed, swapped or damaged"


class Sealer:
    """Seal and open with one master key. May be shared between threads."""

    def __init__(self, key: MasterKey) -> None:
        self.fingerprint = key.fingerprint
        self._aead = AESGCM(key.seal_key.reveal())
        self._id_key = key.id_key.reveal()
        self._fingerprint_aead = AESGCM(key.derive("groups of windows"))

    def id_of(self, data: Buffer) -> bytes:
        """Return the chunk id, which reveals nothing about the content to anyone without the key."""
        return blake3(data, key=self._id_key).digest()

    def fingerprint_of(self, data: Buffer) -> bytes:
        """Return a fingerprint of several chunks, to tell whether they changed, in half the time of a digest. It is a
        universal hash (GHASH) under a key that no other party has. Two contents collide with probability 2^-110 per
        megabyte, as long as no fingerprint is seen outside: keep them sealed. It is never used as a chunk id."""
        return self._fingerprint_aead.encrypt(_FIXED, b"", data)

    def nonces(self, count: int) -> list[bytes]:
        """Return nonces for `count` calls of `seal_into` with a single call to the kernel."""
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
        """Fill `out`, which is exactly len(payload) + OVERHEAD long. `nonce`: one of `nonces`, used only here."""
        nonce = nonce or os.urandom(NONCE)
        out[0] = codec
        out[1:HEAD] = nonce
        self._aead.encrypt_into(nonce, payload, _AAD.pack(_MAGIC, FORMAT, kind, codec, plain_size, ident), out[HEAD:])

    def seal(self, kind: int, ident: bytes, codec: int, payload: Buffer, plain_size: int) -> bytearray:
        out = bytearray(len(payload) + OVERHEAD)
        self.seal_into(memoryview(out), kind, ident, codec, payload, plain_size)
        return out

    def check(self, kind: int, ident: bytes, sealed: Buffer, plain_size: int) -> tuple[int, bytes]:
        """Return (codec, payload) if every bit is as sealed; else raise ImageRefused."""
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
        """Verify a chunk as `check` does without returning its content; `scratch` must have room for it."""
        if len(sealed) < OVERHEAD:
            raise ImageRefused("a sealed part is cut short", HINT)
        aad = _AAD.pack(_MAGIC, FORMAT, CHUNK, sealed[0], plain_size, ident)
        try:
            self._aead.decrypt_into(sealed[1:HEAD], sealed[HEAD:], aad, scratch[: len(sealed) - OVERHEAD])
        except InvalidTag:
            raise ImageRefused(_CHANGED, HINT) from None

    def open_into(self, out: memoryview, ident: bytes, sealed: Buffer, codec: Codec) -> None:
        """Decrypt a chunk of exactly this size into `out`, checking tag and size. The tag vouches for the id, which was
        computed before sealing, so memory being restored is not digested again. After ImageRefused the content of `out`
        is undefined."""
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
        """Return the plaintext of a chunk, with tag, size and digest checked."""
        kind, payload = self.check(CHUNK, ident, sealed, plain_size)
        data = codec.unpack(kind, payload, plain_size)
        if self.id_of(data) != ident:
            raise ImageRefused("a chunk's content does not match its id", HINT)
        return data
