"""What relays keep beside the leases: each credential that was made, and whether it is revoked; and sessions' names.

Two kinds of cells in one register: `c.ID` and `n.SESSION`. A credential that is not
here admits nobody, however well it is signed, so a lost key of the fleet's can be
answered: what it signs is listed nowhere.
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
TRIES = 8


@dataclass(frozen=True, slots=True)
class Issue:
    """One credential that was made. Times are unix seconds."""

    claims: Claims
    created: float
    revoked: float | None

    def why_not(self, now: float) -> str:
        """Why it admits nobody any more; empty when it does."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.claims.is_over(now) else ""

    def to_bytes(self) -> bytes:
        table = {"v": 1, "claims": b64(self.claims.to_bytes()), "created": self.created, "revoked": self.revoked}
        return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()


class Issued:
    """Over any register; from several threads at once. LeaseUnreachable as that says."""

    def __init__(self, register: Register) -> None:
        self.register = register

    def add(self, claims: Claims, created: float) -> Issue:
        issue = Issue(claims, created, None)
        if self.register.write(Swap(_CREDENTIAL + claims.id, issue.to_bytes(), None)) is None:
            found = self.find(claims.id)  # a lost answer that was tried again below us
            if found != issue:
                raise LeaseUnreachable("the credential's id is taken already", "Try again.")
        return issue

    def find(self, ident: str) -> Issue | None:
        """As it stands now; None: never made, here."""
        cell = self.register.read(_CREDENTIAL + ident)
        return None if cell is None else _parsed(cell.data, ident)

    def revoke(self, ident: str, at: float) -> Issue:
        """From now on it admits nobody; a second time changes nothing."""
        for _ in range(TRIES):
            cell = self.register.read(_CREDENTIAL + ident)
            if cell is None:
                raise NotFound(f"no credential {ident}", "See: cmdop-migrate relay token ls")
            issue = _parsed(cell.data, ident)
            if issue.revoked is not None:
                return issue
            issue = Issue(issue.claims, issue.created, at)
            if self.register.write(Swap(_CREDENTIAL + ident, issue.to_bytes(), cell.version)) is not None:
                return issue
        raise LeaseUnreachable(f"credential {ident} changed {TRIES} times while it was being revoked", "Try again.")

    def all(self) -> Iterator[Issue]:
        for key in self.register.sessions():
            if key.startswith(_CREDENTIAL):
                found = self.find(key.removeprefix(_CREDENTIAL))
                if found is not None:
                    yield found

    def name_of(self, session: str) -> str | None:
        cell = self.register.read(_NAME + session)
        return None if cell is None else cell.data.decode("utf-8", "replace")

    def keep_name(self, session: str, name: str) -> None:
        """The last who holds the session says what it is called."""
        for _ in range(TRIES):
            cell = self.register.read(_NAME + session)
            if cell is not None and cell.data == name.encode():
                return
            swap = Swap(_NAME + session, name.encode(), cell.version if cell else None)
            if self.register.write(swap) is not None:
                return


def _parsed(data: bytes, ident: str) -> Issue:
    try:
        table: dict[str, Any] = json.loads(data)
        claims = parse_claims(unb64(table["claims"]))
        revoked = table["revoked"]
        if table["v"] != 1 or claims.id != ident:
            raise ValueError("of another version, or another credential")
        return Issue(claims, float(table["created"]), None if revoked is None else float(revoked))
    except (ValueError, KeyError, TypeError, RecursionError, NotAdmitted):
        raise LeaseUnreadable(
            f"what the lease store holds for credential {ident} is none",
            "Make another: cmdop-migrate relay token create",
        ) from None
