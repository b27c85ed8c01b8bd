"""Names and numbers of the image format, all of them, in one place (docs/internals/image-format.md).

    packs/<xx>/<pack>               sealed chunks, some MiB of them; xx = first two digits of the pack id
    index/<checkpoint>              which chunks the packs of one upload hold
    manifests/<session>/<checkpoint>  the checkpoint itself: signed, published last
    uploads/<checkpoint>            an upload is under way; refreshed while it lives
    doomed/<run>                    packs that one prune run means to delete
    store-id                        which store this is, whatever its address: written once, by who first asks

Ids are lowercase hex. A checkpoint's is random, but that of a branch's first one ends with its session's. A pack id is
random and never used twice.
"""

from __future__ import annotations

import re
import secrets

from cmdop_migrate.errors import ImageRefused

FORMAT = 1
PAGE = 4096
WINDOW = 64 << 10  # memory is cut where the virtual address is a multiple of this
MAX_CHUNK = 1 << 20  # of plaintext
PACK_SIZE = 8 << 20
MAX_INDEX = 64 << 20  # a larger one is not read: the index is a hint, memory is not
NO_CHUNK = 0xFFFFFFFF  # in a page table: this window is all zero
ID_BYTES = 32
PACK_ID_BYTES = 16
ID_DIGITS = 2 * PACK_ID_BYTES  # of what `new_id` makes
FINGERPRINT_BYTES = 16

PACKS = "packs/"
INDEXES = "index/"
MANIFESTS = "manifests/"
UPLOADS = "uploads/"
DOOMED = "doomed/"
STORE_ID = "store-id"

_ID = re.compile(r"[0-9a-f]{4,64}")
_BLOB = re.compile(r"[A-Za-z0-9_@+-][A-Za-z0-9._@+-]*(/[A-Za-z0-9_@+-][A-Za-z0-9._@+-]*)*")
MAX_BLOB_NAME = 200
PAGE_TABLES = "pages/"  # blobs with this prefix are page tables


def new_id() -> str:
    """For checkpoints, packs and prune runs."""
    return secrets.token_hex(PACK_ID_BYTES)


def birth_id(session: str) -> str:
    """For the checkpoint that a branch is born with (birth.py): told from all others by how it ends."""
    return new_id()[: ID_DIGITS - len(session)] + session


def is_birth(session: str, checkpoint: str) -> bool:
    return len(checkpoint) == ID_DIGITS and checkpoint.endswith(session)


def checked_id(text: str, what: str = "id") -> str:
    """`text`, if it can stand in an object name; ids come from manifests and from people."""
    if not isinstance(text, str) or not _ID.fullmatch(text):
        raise ImageRefused(f"not a valid {what}: {text!r:.80}", "Ids are 4 to 64 lowercase hex digits.")
    return text


def checked_blob_name(name: str) -> str:
    """`name`, if it is a plain relative path: no empty, hidden or parent part."""
    if not isinstance(name, str) or len(name) > MAX_BLOB_NAME or not _BLOB.fullmatch(name):
        raise ImageRefused(f"not a valid name inside an image: {name!r:.80}", "cmdop-migrate makes no such image.")
    return name


def pack_name(pack: str) -> str:
    return f"{PACKS}{pack[:2]}/{pack}"


def index_name(checkpoint: str) -> str:
    return f"{INDEXES}{checkpoint}"


def manifest_name(session: str, checkpoint: str) -> str:
    return f"{MANIFESTS}{session}/{checkpoint}"


def upload_name(checkpoint: str) -> str:
    return f"{UPLOADS}{checkpoint}"


def doomed_name(run: str) -> str:
    return f"{DOOMED}{run}"


def last_part(name: str) -> str | None:
    """The id at the end of an object name, or None when it is no name of ours."""
    tail = name.rsplit("/", 1)[-1]
    return tail if _ID.fullmatch(tail) else None


def pack_of(name: str) -> str | None:
    """The pack id of `packs/xx/id`, or None when it is no name of ours."""
    tail = last_part(name)
    return tail if tail is not None and len(tail) == ID_DIGITS and name == pack_name(tail) else None


def manifest_of(name: str) -> tuple[str, str] | None:
    """(session, checkpoint) of `manifests/…/…`, or None when it is no name of ours."""
    parts = name.split("/")
    if len(parts) != 3 or not _ID.fullmatch(parts[1]) or not _ID.fullmatch(parts[2]):
        return None
    return parts[1], parts[2]
