"""Test what relays keep beside the leases, in every kind of lease store: neither is ever mistaken for the other."""

from __future__ import annotations

import uuid

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cmdop_migrate.lease.registry import RELAY, open_lease, open_register, sibling
from cmdop_migrate.lease.store import Held
from cmdop_migrate.relay.credential_registry import CredentialRegistry
from cmdop_migrate.relay.credentials import issue


def test_credentials_live_beside_the_leases(lease_url: str) -> None:
    leases = open_lease(lease_url, proven=True)
    issued = CredentialRegistry(open_register(sibling(lease_url, RELAY), proven=True))
    session = uuid.uuid4().hex[:24]
    assert isinstance(leases.acquire(session, "host-a", "i", 5.0), Held)
    claims = issue(Ed25519PrivateKey.generate(), "client", "alice", "read", "*", None).claims
    made = issued.add(claims, 1.5)
    issued.keep_name(session, "work")
    assert list(leases.sessions()) == [session] and list(issued.all()) == [made]
    assert issued.name_of(session) == "work" and issued.find("0" * 24) is None
    assert issued.revoke(claims.id, 2.5) == issued.find(claims.id)
    seen = leases.inspect(session)
    assert seen is not None and seen.record.state == "held"
    leases.close()
    issued.register.close()
