"""Define all names and numbers of the image format, in one place (docs/internals/image-format.md).

    packs/<xx>/<pack>               sealed chunks, some MiB of them; xx = first two digits of the pack id
    index/<checkpoint>              which chunks the packs of one upload hold
    manifests/<session>/<checkpoint>  the checkpoint itself: signed, published last
    uploads/<checkpoint>            mark of an upload in progress; refreshed until it ends
    doomed/<run>                    deletion mark: packs that one prune run is about to delete
    store-id                        identity of the store, independent of its address: written once, by the first host

Ids are lowercase hex. A checkpoint id is random, except that the id of a fork's initial checkpoint ends with its
session id. A pack id is random and never used twice.
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
MAX_INDEX = 64 << 20  # a larger index is not read: it is only a hint, and would cost memory
NO_CHUNK = 0xFFFFFFFF  # in a page table: this window is all zeros
ID_BYTES = 32
PACK_ID_BYTES = 16
ID_DIGITS = 2 * PACK_ID_BYTES  # length of what `new_id` returns
FINGERPRINT_BYTES = 16

PACKS = "packs/"
INDEXES = "index/"
MANIFESTS = "manifests/"
UPLOADS = "uploads/"
DELETION_MARKS = "doomed/"
STORE_ID = "store-id"

_ID = re.compile(r"[0-9a-f]{4,64}")
_BLOB = re.compile(r"[A-Za-z0-9_@+-][A-Za-z0-9._@+-]*(/[A-Za-z0-9_@+-][A-Za-z0-9._@+-]*)*")
MAX_BLOB_NAME = 200
PAGE_TABLES = "pages/"  # blobs with this prefix are page tables


def new_id() -> str:
    """Return a random id, for a checkpoint, pack or prune run."""
    return secrets.token_hex(PACK_ID_BYTES)


def fork_checkpoint_id(session: str) -> str:
    """Return an id for a fork's initial checkpoint (images/store/fork_manifest.py), recognisable by its suffix."""
    return new_id()[: ID_DIGITS - len(session)] + session


def is_fork(session: str, checkpoint: str) -> bool:
    """Return True if this is the id of the initial checkpoint that the session was forked with."""
    return len(checkpoint) == ID_DIGITS and checkpoint.endswith(session)


def checked_id(text: str, what: str = "id") -> str:
    """Return `text` if it is safe in an object name, else raise ImageRefused: ids come from manifests and users."""
    if not isinstance(text, str) or not _ID.fullmatch(text):
        raise ImageRefused(f"not a valid {what}: {text!r:.80}", "Ids are 4 to 64 lowercase hex digits.")
    return text


def checked_blob_name(name: str) -> str:
    """Return `name` if it is a plain relative path (no empty, hidden or parent part), else raise ImageRefused."""
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


def deletion_mark_name(run: str) -> str:
    return f"{DELETION_MARKS}{run}"


def last_part(name: str) -> str | None:
    """Return the id at the end of an object name, or None if the name is not of this format."""
    tail = name.rsplit("/", 1)[-1]
    return tail if _ID.fullmatch(tail) else None


def pack_of(name: str) -> str | None:
    """Return the pack id of `packs/xx/id`, or None if the name is not of this format."""
    tail = last_part(name)
    return tail if tail is not None and len(tail) == ID_DIGITS and name == pack_name(tail) else None


def manifest_of(name: str) -> tuple[str, str] | None:
    """Return (session, checkpoint) of `manifests/…/…`, or None if the name is not of this format."""
    parts = name.split("/")
    if len(parts) != 3 or not _ID.fullmatch(parts[1]) or not _ID.fullmatch(parts[2]):
        return None
    return parts[1], parts[2]
