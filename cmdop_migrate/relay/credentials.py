"""Define credentials: bearer, role and sessions that the relay admits (docs/internals/relay-protocol.md).

The fleet's Ed25519 key signs claims; the bearer proves that it has the private
half of the key named in them. Ed25519 verification uses no secret, and no secret
is compared here, so the time that it takes reveals nothing.
"""

from __future__ import annotations

import base64
import json
import os
import re
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cmdop_migrate.errors import NotAdmitted, Usage
from cmdop_migrate.log import Secret
from cmdop_migrate.relay.frames import session_bytes

PREFIX = "cmr1_"
VERSION = 1
TEXT_MAX = 8192
CLAIMS_MAX = 2048
NONCE_SIZE = 32
KEY_SIZE = 32
_SIGNATURE_SIZE = 64

Kind = Literal["client", "host"]
Role = Literal["read", "execute", "admin", "host"]
CLIENT_ROLES: tuple[Role, ...] = ("read", "execute", "admin")

_ISSUED = b"cmdop-migrate relay credential 1\0"
_HELLO = b"cmdop-migrate relay hello 1\0"
_HOST = b"cmdop-migrate relay host 1\0"
_CLIENT = b"cmdop-migrate relay client 1\0"

_ID = re.compile(r"[0-9a-f]{24}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,62}")
_GLOB = re.compile(r"[A-Za-z0-9._*?\[\]!-]{1,128}")
_PIN = re.compile(r"[0-9a-f]{64}")
_HINT = "Ask for another: cmdop-migrate relay token create"


@dataclass(frozen=True, slots=True)
class Claims:
    """Represent the fleet's statement about a bearer. `expires`: unix seconds, or None for never. `key`: base64url."""

    id: str
    kind: Kind
    name: str
    role: Role
    sessions: str
    expires: int | None
    key: str
    v: int = VERSION

    def to_bytes(self) -> bytes:
        """Return the canonical form: one value has one form, and `parse_claims` accepts no other."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    def covers(self, session: str, name: str | None) -> bool:
        """Return whether the claims are for this session, by its id or, if it is known, by its name."""
        return fnmatchcase(session, self.sessions) or (name is not None and fnmatchcase(name, self.sessions))

    def is_over(self, now: float) -> bool:
        """Return whether the claims have expired."""
        return self.expires is not None and now >= self.expires

    @property
    def public_key(self) -> Ed25519PublicKey:
        """Return the bearer's key."""
        return Ed25519PublicKey.from_public_bytes(unb64(self.key, KEY_SIZE))


@dataclass(frozen=True, slots=True)
class Credential:
    """Represent all that a bearer has. Its repr contains no secret; only `text` reveals it."""

    claims: Claims
    signature: bytes
    seed: Secret
    fleet: bytes
    relay: str | None = None
    pin: str | None = None

    @property
    def signer(self) -> Ed25519PrivateKey:
        """Return the bearer's private key."""
        return Ed25519PrivateKey.from_private_bytes(self.seed.reveal())

    def text(self) -> str:
        """Return the credential as the text that `parse` reads, with its secret."""
        table: dict[str, Any] = {
            "claims": b64(self.claims.to_bytes()),
            "signature": b64(self.signature),
            "seed": b64(self.seed.reveal()),
            "fleet": b64(self.fleet),
        }
        table.update({key: value for key, value in (("relay", self.relay), ("pin", self.pin)) if value})
        return PREFIX + b64(json.dumps(table, sort_keys=True, separators=(",", ":")).encode())

    def hello(self, nonce: bytes) -> dict[str, str]:
        """Return the payload of HELLO, the answer to a CHALLENGE."""
        return {**self.presented(), "proof": b64(self.signer.sign(_HELLO + nonce))}

    def presented(self) -> dict[str, str]:
        """Return claims and signature as they cross the wire. Without the private key they admit no bearer."""
        return {"claims": b64(self.claims.to_bytes()), "signature": b64(self.signature)}


def issue(
    signer: Ed25519PrivateKey,
    kind: Kind,
    name: str,
    role: Role,
    sessions: str,
    expires: int | None,
    relay: str | None = None,
    pin: str | None = None,
) -> Credential:
    """Return a new credential, signed with the fleet's key. Raise Usage if a field has an invalid value."""
    seed = os.urandom(KEY_SIZE)
    key = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    claims = Claims(os.urandom(12).hex(), kind, name, role, sessions, expires, b64(key))
    field = _invalid_field(asdict(claims))
    if field:
        raise Usage(
            f"invalid {field} for a credential", "Names: letters, digits and . _ @ + -; --session: also * ? [ ]."
        )
    signature = signer.sign(_ISSUED + claims.to_bytes())
    return Credential(claims, signature, Secret(seed), signer.public_key().public_bytes_raw(), relay, pin)


def parse(text: str) -> Credential:
    """Parse a credential. Raise NotAdmitted if it is damaged, or not signed by the fleet that it names."""
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > TEXT_MAX:
        raise NotAdmitted(f"not a credential: it does not begin with {PREFIX}, or is too long", _HINT)
    try:
        table = json.loads(unb64(text.removeprefix(PREFIX)))
        if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
            raise ValueError("not a table of texts")
        fleet = unb64(table["fleet"], KEY_SIZE)
        seed = unb64(table["seed"], KEY_SIZE)
        raw, signature = unb64(table["claims"]), unb64(table["signature"], _SIGNATURE_SIZE)
        relay, pin = table.get("relay"), table.get("pin")
        if pin is not None and not _PIN.fullmatch(pin):
            raise ValueError("not a digest")
    except (ValueError, KeyError, RecursionError):
        raise NotAdmitted("the credential is damaged", _HINT) from None  # the cause may quote it
    claims = verify(fleet, raw, signature)
    key = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    if key != unb64(claims.key, KEY_SIZE):
        raise NotAdmitted("the credential is damaged: its two halves do not belong together", _HINT)
    return Credential(claims, signature, Secret(seed), fleet, relay, pin)


def verify(fleet: bytes, claims: bytes, signature: bytes) -> Claims:
    """Return the claims if the fleet signed them; raise NotAdmitted if not. Does not check expiry and revocation."""
    if not check_signature(fleet, _ISSUED + claims, signature):
        raise NotAdmitted("the credential is not signed by this fleet", _HINT)
    return parse_claims(claims)


def verify_presented(fleet: bytes, claims: str, signature: str) -> Claims:
    """Verify claims and signature as they cross the wire. Raise NotAdmitted."""
    try:
        raw, signed = unb64(claims), unb64(signature, _SIGNATURE_SIZE)
    except ValueError:
        raise NotAdmitted("the credential is damaged", _HINT) from None
    return verify(fleet, raw, signed)


def verify_hello(claims: Claims, nonce: bytes, proof: str) -> None:
    """Raise NotAdmitted unless the proof shows that the peer has the key of these claims."""
    try:
        signature = unb64(proof, _SIGNATURE_SIZE)
    except ValueError:
        signature = b""
    if not check_signature(unb64(claims.key, KEY_SIZE), _HELLO + nonce, signature):
        raise NotAdmitted("the bearer does not have the credential's key", _HINT)


def host_words(session: str, token: int, host: str, client_key: bytes, host_key: bytes) -> bytes:
    """Return what a link signs with the fleet's key: the incarnation of the session, its host, and both keys."""
    name = host.encode()
    return (
        _HOST + session_bytes(session) + token.to_bytes(8, "big") + len(name).to_bytes(1, "big") + name
        + client_key + host_key
    )  # fmt: skip


def client_words(client_key: bytes, host_key: bytes, session: str) -> bytes:
    """Return what a client signs with its credential's key, inside the encrypted channel."""
    return _CLIENT + client_key + host_key + session_bytes(session)


def check_signature(key: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether the signature over `message` is valid for the key."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def parse_claims(data: bytes) -> Claims:
    """Parse claims. Raise NotAdmitted if they are invalid or not in canonical form."""
    try:
        if len(data) > CLAIMS_MAX:
            raise ValueError("too long")
        table = json.loads(data.decode("utf-8"))
        if not isinstance(table, dict) or _invalid_field(table):
            raise ValueError("invalid claims")
        claims = Claims(**table)
        if claims.to_bytes() != data:
            raise ValueError("not canonical")
    except (ValueError, TypeError, RecursionError):
        raise NotAdmitted("the credential's claims are invalid for this version", _HINT) from None
    return claims


_FIELDS = {field.name for field in fields(Claims)}


def _invalid_field(table: dict[str, Any]) -> str:
    """Return the name of the first invalid field; empty if all are valid."""
    if table.keys() != _FIELDS:
        return "set of fields"
    texts = (("id", _ID), ("name", _NAME), ("sessions", _GLOB))
    for field, pattern in texts:
        if not isinstance(table[field], str) or not pattern.fullmatch(table[field]):
            return field
    if type(table["v"]) is not int or table["v"] != VERSION:
        return "version"
    roles = {"client": CLIENT_ROLES, "host": ("host",)}
    if not isinstance(table["kind"], str) or table["role"] not in roles.get(table["kind"], ()):
        return "role"
    if table["expires"] is not None and (type(table["expires"]) is not int or not 0 <= table["expires"] < 2**53):
        return "expires"
    try:
        unb64(table["key"], KEY_SIZE)
    except (ValueError, TypeError):
        return "key"
    return ""


def b64(data: bytes) -> str:
    """Encode as base64url without padding, the only form of bytes in this protocol's JSON."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def unb64(text: str, size: int | None = None) -> bytes:
    """Decode base64url. Raise ValueError for any other form of the same bytes, and for another size."""
    if not isinstance(text, str):
        raise ValueError("not a text")
    data = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if b64(data) != text or (size is not None and len(data) != size):
        raise ValueError("not base64url, or of another size")
    return data
