"""Keep the relays' registry beside the leases: issued credentials, whether they are revoked, and names.

Two kinds of cells in one register: `c.ID` and `n.SESSION`. A credential that is not
listed is not admitted, however valid its signature, so a stolen key of the fleet does
not suffice: what it signs is not listed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cmdop_migrate.errors import LeaseUnreachable, LeaseUnreadable, NotAdmitted, NotFound
from cmdop_migrate.lease.register import Register, Swap
from cmdop_migrate.relay.credentials import Claims, b64, parse_claims, unb64

_CREDENTIAL = "c."
_NAME = "n."
WRITE_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class IssuedCredential:
    """Represent one credential in the registry. Times are unix seconds."""

    claims: Claims
    created: float
    revoked: float | None

    def invalid_because(self, now: float) -> str:
        """Return why the credential is invalid; empty if it is valid."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.claims.is_over(now) else ""

    def to_bytes(self) -> bytes:
        """Return the content of the credential's cell."""
        table = {"v": 1, "claims": b64(self.claims.to_bytes()), "created": self.created, "revoked": self.revoked}
        return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()


class CredentialRegistry:
    """Keep credentials and names in a register, for several threads. Raise LeaseUnreachable."""

    def __init__(self, register: Register) -> None:
        self.register = register

    def add(self, claims: Claims, created: float) -> IssuedCredential:
        """List a credential."""
        issued = IssuedCredential(claims, created, None)
        if self.register.write(Swap(_CREDENTIAL + claims.id, issued.to_bytes(), None)) is None:
            existing = self.find(claims.id)  # ours, if the register lost the reply and wrote again
            if existing != issued:
                raise LeaseUnreachable("the credential's id is taken already", "Try again.")
        return issued

    def find(self, ident: str) -> IssuedCredential | None:
        """Return a credential as it is listed now, or None if it is not. Raise LeaseUnreadable if it is damaged."""
        cell = self.register.read(_CREDENTIAL + ident)
        return None if cell is None else _parsed(cell.data, ident)

    def revoke(self, ident: str, at: float) -> IssuedCredential:
        """Revoke a credential; revoking it twice changes nothing. Raise NotFound, LeaseUnreachable."""
        for _ in range(WRITE_ATTEMPTS):
            cell = self.register.read(_CREDENTIAL + ident)
            if cell is None:
                raise NotFound(f"no credential {ident}", "See: cmdop-migrate relay token ls")
            issued = _parsed(cell.data, ident)
            if issued.revoked is not None:
                return issued
            issued = IssuedCredential(issued.claims, issued.created, at)
            if self.register.write(Swap(_CREDENTIAL + ident, issued.to_bytes(), cell.version)) is not None:
                return issued
        raise LeaseUnreachable(
            f"credential {ident} changed {WRITE_ATTEMPTS} times while it was being revoked", "Try again."
        )

    def all(self) -> Iterator[IssuedCredential]:
        """Yield all credentials."""
        for key in self.register.sessions():
            if key.startswith(_CREDENTIAL):
                issued = self.find(key.removeprefix(_CREDENTIAL))
                if issued is not None:
                    yield issued

    def name_of(self, session: str) -> str | None:
        """Return the name that was kept for a session, or None."""
        cell = self.register.read(_NAME + session)
        return None if cell is None else cell.data.decode("utf-8", "replace")

    def keep_name(self, session: str, name: str) -> None:
        """Keep a session's name. The last host that holds the session wins."""
        for _ in range(WRITE_ATTEMPTS):
            cell = self.register.read(_NAME + session)
            if cell is not None and cell.data == name.encode():
                return
            swap = Swap(_NAME + session, name.encode(), cell.version if cell else None)
            if self.register.write(swap) is not None:
                return


def _parsed(data: bytes, ident: str) -> IssuedCredential:
    try:
        table: dict[str, Any] = json.loads(data)
        claims = parse_claims(unb64(table["claims"]))
        revoked = table["revoked"]
        if table["v"] != 1 or claims.id != ident:
            raise ValueError("of another version, or another credential")
        return IssuedCredential(claims, float(table["created"]), None if revoked is None else float(revoked))
    except (ValueError, KeyError, TypeError, RecursionError, NotAdmitted):
        raise LeaseUnreadable(
            f"the lease store's entry of credential {ident} is damaged",
            "Make another: cmdop-migrate relay token create",
        ) from None
