"""Make an end of a session that exists only in the store: its lease is ended, so that no host restores it any more.

Its checkpoints stay until they are pruned, and may be restored as copies. First
the lease, then this host's record: whoever is killed in between, the next
`kill` finishes it.
"""

from __future__ import annotations

import os
from typing import Any

from cmdop_migrate.errors import SessionNotFound
from cmdop_migrate.host import leases, references, session_lock
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Record

SURE = 8  # digits of an id that nobody types by mistake


def parked_here(this_host: Host, record: Record) -> dict[str, Any]:
    """By this host's record. Fenced when another host runs it by now."""
    return _discard(this_host, record.session, record.name, record.token)


def in_store(this_host: Host, reference: str, unknown: SessionNotFound) -> dict[str, Any]:
    """One that this host has no record of. `unknown` is raised when the store has none either."""
    session = references.session_of(this_host, reference)
    if session is None:
        raise unknown
    manifests = references.manifests(this_host, session)
    name = str(max(manifests, key=lambda one: one.token).facts.get("name")) if manifests else session
    if reference != name and len(reference) < SURE:
        raise SessionNotFound(
            f"no session {reference!r} here; one in the store has an id that begins so",
            f"Give its name or more: {session[:12]}",
        )
    return _discard(this_host, session, name, max((one.token for one in manifests), default=0))


def _discard(this_host: Host, session: str, name: str, above: int) -> dict[str, Any]:
    lock = session_lock.to_discard(this_host, session, name)
    try:
        before, after = leases.end(leases.open_store(this_host.config), this_host, session, name, above)
        this_host.note("discarded", session, name=name, token=after.token, checkpoint=before)
        this_host.forget(session)
    finally:
        if not (this_host.directory(session) / "session.json").exists():
            this_host.forget(session)  # a directory made only for the lock
        os.close(lock)
    facts = {"discarded": True, "checkpoint": before, "token": after.token}
    return {"session": session, "exit": None, "reason": "discarded", **facts}
