"""Keep the keys that seal images: a ring of master keys, one of them current.

Everything else is derived from a master key by BLAKE3 with a fixed context: the key of the chunk ids, the AEAD key, the
signing seed, the fingerprint. The ring lives in one 0600 file. Rotation adds a key and keeps the old ones, so old
checkpoints stay readable; ids of different keys never meet.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cmdop_migrate.clock import walltime
from cmdop_migrate.errors import BadConfig, ImageRefused, Usage
from cmdop_migrate.images.format.layout import FINGERPRINT_BYTES
from cmdop_migrate.log import Secret
from cmdop_migrate.util import locks
from cmdop_migrate.util.digest import blake3

MASTER_BYTES = 32
FILE_FORMAT = 1
STALE = 60.0  # seconds after which a temporary file has no writer any more
_BEGIN = "-----BEGIN CMDOP-MIGRATE KEYS-----"
_END = "-----END CMDOP-MIGRATE KEYS-----"
_CONTEXT = "cmdop-migrate 2026-11 image format 1: "


@dataclass(frozen=True)
class MasterKey:
    """Hold one master key and derive keys from it. Its repr shows no secret."""

    master: Secret
    created: float

    def derive(self, purpose: str, length: int = 32) -> bytes:
        return blake3(self.master.reveal(), derive_key_context=_CONTEXT + purpose).digest(length=length)

    @cached_property
    def fingerprint(self) -> str:
        return self.derive("fingerprint", FINGERPRINT_BYTES).hex()

    @cached_property
    def id_key(self) -> Secret:
        return Secret(self.derive("chunk ids"))

    @cached_property
    def seal_key(self) -> Secret:
        return Secret(self.derive("seal"))

    @cached_property
    def signer(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.derive("signing seed"))


@dataclass(frozen=True)
class KeyRing:
    """Hold all keys this host knows; the first is the current one."""

    keys: tuple[MasterKey, ...]

    @property
    def current(self) -> MasterKey:
        return self.keys[0]

    def find(self, fingerprint: str) -> MasterKey | None:
        return next((key for key in self.keys if key.fingerprint == fingerprint), None)

    @property
    def oldest(self) -> MasterKey:
        return min(self.keys, key=lambda key: (key.created, key.fingerprint))

    @property
    def relay_signer(self) -> Ed25519PrivateKey:
        """Return the fleet's identity towards relays and clients. Derived from the oldest key, so rotation keeps it."""
        return Ed25519PrivateKey.from_private_bytes(self.oldest.derive("relay identity"))

    def get(self, fingerprint: str) -> MasterKey:
        """Return the key with this fingerprint. Raise ImageRefused if this host lacks it: the image cannot be read
        here."""
        key = self.find(fingerprint)
        if key is None:
            raise ImageRefused(
                f"sealed with key {fingerprint[:16]}, which this host does not have",
                "On a host that has it: cmdop-migrate key export. Here: cmdop-migrate key import.",
            )
        return key


def new_key() -> MasterKey:
    return MasterKey(Secret(secrets.token_bytes(MASTER_BYTES)), round(walltime(), 3))


def load(path: Path) -> KeyRing:
    """Read the ring. Refuse a file that others can read: then the key is no longer secret."""
    try:
        with path.open("rb") as file:  # refuses a directory, too
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise BadConfig(f"the key file {path} is not a regular file", "Check key_file.")
            if mode & 0o077:
                hint = f"Run: chmod 600 {path}. Then: cmdop-migrate key rotate."
                raise BadConfig(f"the key file {path} can be read by others", hint)
            data = file.read(1 << 20)
    except OSError as error:
        raise BadConfig(f"cannot read the key file {path}: {error.strerror}", "Check key_file.") from error
    try:
        return _decode(data)
    except ValueError as error:
        raise BadConfig(f"the key file {path} is damaged: {error}", "Restore it from a backup.") from error


def load_or_create(path: Path) -> KeyRing:
    """Read the ring, or create one with a new key. Of several concurrent callers one wins; all get its key."""
    if not path.exists():
        try:
            _write(path, KeyRing((new_key(),)), first=True)
        except FileExistsError:
            pass  # another process created it first: use its key
        except OSError as error:
            raise BadConfig(f"cannot create the key file {path}: {error.strerror}", "Check key_file.") from error
    return load(path)


def rotate(path: Path) -> KeyRing:
    """Add a new key and make it current. Durable when this returns."""
    load_or_create(path)
    with _changing(path), _locked(path):
        ring = KeyRing((new_key(), *load(path).keys))
        _write(path, ring)
    return ring


def export_text(ring: KeyRing) -> str:
    """Return the whole ring as text, to carry to another host. Anyone who has the text can read and make images."""
    body = _encode(ring)
    lines = base64.b64encode(body + blake3(body).digest(length=8)).decode()
    return "\n".join([_BEGIN, *(lines[i : i + 76] for i in range(0, len(lines), 76)), _END, ""])


def import_text(path: Path, text: str, make_current: bool = True) -> KeyRing:
    """Merge an exported ring into the file. Its current key becomes current here too, so that the exporting host can
    read what is sealed here from now on, unless `make_current` is False."""
    theirs = parse_text(text)
    if not path.exists():
        try:
            with _changing(path):
                _write(path, theirs, first=True)
            return theirs
        except FileExistsError:
            pass  # created meanwhile: merge into it
    with _changing(path), _locked(path):
        ours = load(path)
        known = {key.fingerprint for key in theirs.keys}
        rest = tuple(key for key in ours.keys if key.fingerprint not in known)
        ring = KeyRing(theirs.keys + rest)
        if not make_current:
            ring = KeyRing((ours.current, *(k for k in ring.keys if k.fingerprint != ours.current.fingerprint)))
        _write(path, ring)
    return ring


def parse_text(text: str) -> KeyRing:
    """Parse an exported ring. Raise Usage if it is damaged or not one."""
    lines = [line.strip() for line in text.strip().splitlines()]
    hint = "Paste the whole block that cmdop-migrate key export printed."
    if len(lines) < 3 or lines[0] != _BEGIN or lines[-1] != _END:
        raise Usage("not an exported key block", hint)
    try:
        raw = base64.b64decode("".join(lines[1:-1]), validate=True)
        if blake3(raw[:-8]).digest(length=8) != raw[-8:]:
            raise ValueError("the checksum does not match")
        return _decode(raw[:-8])
    except ValueError as error:
        raise Usage(f"the exported key block is damaged: {error}", hint) from error


def _encode(ring: KeyRing) -> bytes:
    keys = [{"created": k.created, "fingerprint": k.fingerprint, "master": k.master.reveal().hex()} for k in ring.keys]
    return json.dumps({"format": FILE_FORMAT, "keys": keys}, indent=1).encode()


def _decode(data: bytes) -> KeyRing:
    """Parse a key ring. Raise ValueError, with a message that quotes no key material, if it is not one."""
    try:
        table = json.loads(data)
        if table["format"] != FILE_FORMAT:
            raise ValueError("unknown format of the key file")
        keys = tuple(
            MasterKey(Secret(bytes.fromhex(entry["master"])), float(entry["created"])) for entry in table["keys"]
        )
        named = [entry["fingerprint"] for entry in table["keys"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("not a key ring of a known format") from None  # the cause may quote the key
    if not keys or any(len(key.master.reveal()) != MASTER_BYTES for key in keys):
        raise ValueError("a key is missing or has the wrong length")
    if [key.fingerprint for key in keys] != named or len(set(named)) != len(named):
        raise ValueError("fingerprints do not match the keys")
    return KeyRing(keys)


def _write(path: Path, ring: KeyRing, first: bool = False) -> None:
    """Replace the file atomically. `first`: create it only if it is missing, else raise FileExistsError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(_encode(ring))
            file.flush()
            os.fsync(file.fileno())
        if first:
            os.link(temporary, path)  # exclusive as O_EXCL is, and never half-written
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Raise BadConfig for errors caused by the setting or by file ownership; others (a full disk) pass through."""
    try:
        yield
    except (PermissionError, NotADirectoryError) as error:
        raise BadConfig(f"cannot write the key file {path}: {error.strerror}", "Check key_file.") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Serialise changes to one key file: a lost update would lose a key."""
    with locks.held(path.with_name(f".{path.name}.lock")):
        _sweep(path)
        yield


def _sweep(path: Path) -> None:
    """Delete complete temporary rings whose writer was killed before renaming them."""
    begin = f".{path.name}."
    for file in path.parent.iterdir():
        rest = file.name.removeprefix(begin)
        if file.name.startswith(begin) and len(rest) == 16 and not rest.strip("0123456789abcdef"):
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mtime < walltime() - STALE:
                    file.unlink()
