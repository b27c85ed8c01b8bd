"""Define the manifest: what a checkpoint is made of. Small, sealed, signed, bound to its name, published last.

On the wire it is one JSON object {format, key, body, signature}. `body` is the sealed canonical JSON of the fields
below; the Ed25519 signature covers it together with the session and checkpoint in the object's name. Nothing in it is
parsed before the signature is verified, and no field is used without a check.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cryptography.exceptions import InvalidSignature

from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.codec import HINT, RAW
from cmdop_migrate.images.format.keys import KeyRing, MasterKey
from cmdop_migrate.images.format.seal import MANIFEST, OVERHEAD, Sealer
from cmdop_migrate.util.digest import blake3

MAX_MANIFEST = 64 << 20
_U64 = (1 << 64) - 1


@dataclass(frozen=True)
class TablePiece:
    """Locate one chunk of the chunk table itself, which must be found without the table."""

    ident: bytes
    pack: int
    offset: int
    length: int
    size: int


@dataclass(frozen=True)
class Blob:
    """Describe a named byte string by the numbers of its chunks, in order."""

    size: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """Describe one checkpoint. `facts` is the caller's own JSON object; this package does not look into it."""

    session: str
    checkpoint: str
    key: str
    token: int
    created: float
    parent: str | None
    packs: tuple[str, ...]
    table: tuple[TablePiece, ...]
    blobs: Mapping[str, Blob]
    sizes: Mapping[str, int]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return layout.manifest_name(self.session, self.checkpoint)

    @property
    def is_fork(self) -> bool:
        """Return True if a fork started with it: its content is another session's (images/store/fork_manifest.py)."""
        return layout.is_fork(self.session, self.checkpoint)


def encode(manifest: Manifest, key: MasterKey) -> bytes:
    body = _canonical(
        {
            "format": layout.FORMAT,
            "session": manifest.session,
            "checkpoint": manifest.checkpoint,
            "token": manifest.token,
            "created": manifest.created,
            "parent": manifest.parent,
            "packs": list(manifest.packs),
            "table": [[d.ident.hex(), d.pack, d.offset, d.length, d.size] for d in manifest.table],
            "blobs": {name: [blob.size, list(blob.chunks)] for name, blob in manifest.blobs.items()},
            "sizes": dict(manifest.sizes),
            "facts": dict(manifest.facts),
        }
    )
    sealer = Sealer(key)
    bound = _bound(manifest.session, manifest.checkpoint)
    sealed = bytes(sealer.seal(MANIFEST, bound, RAW, body, len(body)))
    signature = key.signer.sign(_signed(key.fingerprint, bound, sealed))
    return _envelope(key.fingerprint, sealed, signature)


def decode(session: str, checkpoint: str, data: bytes, ring: KeyRing) -> Manifest:
    """Return the manifest stored under this name. Raise ImageRefused if it is not authentic or not well-formed."""
    if len(data) > MAX_MANIFEST:
        raise refused("it is too large")
    envelope = _parse(data)
    if set(envelope) != {"format", "key", "body", "signature"}:
        raise refused("it is not a manifest")
    _known_format(envelope["format"])
    key = ring.get(_text(envelope["key"]))
    bound = _bound(session, checkpoint)
    try:
        sealed = base64.b64decode(_text(envelope["body"]), validate=True)
        signature = bytes.fromhex(_text(envelope["signature"]))
        key.signer.public_key().verify(signature, _signed(key.fingerprint, bound, sealed))
    except (ValueError, InvalidSignature):
        raise refused("its signature is wrong") from None
    if _envelope(key.fingerprint, sealed, signature) != data:
        raise refused("it is not in canonical form")  # one encoding only: hex and base64 allow several
    codec, body = Sealer(key).check(MANIFEST, bound, sealed, len(sealed) - OVERHEAD)
    if codec != RAW:
        raise refused("unknown compression")
    manifest = _fields(_parse(body), key.fingerprint)
    if (manifest.session, manifest.checkpoint) != (session, checkpoint):
        raise refused("it is stored under the wrong name")
    return manifest


def refused(why: str) -> ImageRefused:
    return ImageRefused(f"the manifest is refused: {why}", HINT)


def _fields(body: dict[str, Any], key: str) -> Manifest:
    names = {"format", *(f.name for f in fields(Manifest))} - {"key"}
    _known_format(body.get("format"))
    if set(body) != names:
        raise refused("fields are missing or unknown")
    created = body["created"]
    if isinstance(created, bool) or not isinstance(created, int | float) or not math.isfinite(created):
        raise refused("its time is not a number")
    packs = tuple(_pack_id(pack) for pack in _list(body["packs"]))
    if len(set(packs)) != len(packs):
        raise refused("a pack is named twice")
    blobs = {layout.checked_blob_name(name): _blob(row) for name, row in _object(body["blobs"]).items()}
    return Manifest(
        session=layout.checked_id(body["session"], "session id"),
        checkpoint=layout.checked_id(body["checkpoint"], "checkpoint id"),
        key=key,
        token=_number(body["token"]),
        created=float(created),
        parent=None if body["parent"] is None else layout.checked_id(body["parent"], "checkpoint id"),
        packs=packs,
        table=tuple(_direct(row, len(packs)) for row in _list(body["table"])),
        blobs=blobs,
        sizes={_text(name): _number(value) for name, value in _object(body["sizes"]).items()},
        facts=_object(body["facts"]),
    )


def _direct(row: object, packs: int) -> TablePiece:
    values = _list(row)
    if len(values) != 5:
        raise refused("a table piece has the wrong shape")
    try:
        ident = bytes.fromhex(_text(values[0]))
    except ValueError:
        raise refused("a table piece has no valid id") from None
    pack, offset, length, size = (_number(value) for value in values[1:])
    if len(ident) != layout.ID_BYTES or pack >= packs or offset + length > layout.PACK_SIZE:
        raise refused("a table piece lies outside of any pack")
    if not OVERHEAD <= length <= size + OVERHEAD or not 0 < size <= layout.MAX_CHUNK:
        raise refused("a table piece has an impossible size")
    return TablePiece(ident, pack, offset, length, size)


def _blob(row: object) -> Blob:
    values = _list(row)
    if len(values) != 2:
        raise refused("a blob has the wrong shape")
    size, chunks = _number(values[0]), tuple(_number(value) for value in _list(values[1]))
    if not len(chunks) <= size <= len(chunks) * layout.MAX_CHUNK:
        raise refused("a blob has an impossible size")
    return Blob(size, chunks)


def _pack_id(value: object) -> str:
    pack = layout.checked_id(_text(value), "pack id")
    if len(pack) != 2 * layout.PACK_ID_BYTES:
        raise refused("a pack id has the wrong length")
    return pack


def _known_format(value: object) -> None:
    if value != layout.FORMAT or isinstance(value, bool):
        raise ImageRefused(
            f"image format {value!r:.20} is not known to this version", "Use the version of cmdop-migrate that made it."
        )


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _U64:
        raise refused("a number is missing or out of range")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise refused("a text is missing")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise refused("a list is missing")
    return value


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refused("an object is missing")
    return value


def _parse(data: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise refused("a name occurs twice")
        return table

    try:
        return _object(json.loads(data, object_pairs_hook=once))
    except (ValueError, RecursionError):
        raise refused("it is not JSON") from None


def _canonical(table: Mapping[str, Any]) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _bound(session: str, checkpoint: str) -> bytes:
    return blake3(f"{session}/{checkpoint}".encode()).digest()


def _envelope(fingerprint: str, sealed: bytes, signature: bytes) -> bytes:
    body = base64.b64encode(sealed).decode()
    return _canonical({"format": layout.FORMAT, "key": fingerprint, "body": body, "signature": signature.hex()})


def _signed(fingerprint: str, bound: bytes, sealed: bytes) -> bytes:
    return b"cmdop-migrate manifest\0" + bytes([layout.FORMAT]) + bytes.fromhex(fingerprint) + bound + sealed
