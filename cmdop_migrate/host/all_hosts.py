"""Sessions of all hosts that share this one's lease store."""

from __future__ import annotations

from typing import Any

from cmdop_migrate.errors import CheckpointNotFound, ImageRefused
from cmdop_migrate.host import leases, resources, talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.store import catalog
from cmdop_migrate.model import State
from cmdop_migrate.storage.base import Store
from cmdop_migrate.util import threads

HOSTS = "host."  # leases of host names, not of sessions
_STATES: dict[str, State] = {"held": "running", "parked": "parked", "free": "exited"}


def list_all(this_host: Host) -> list[dict[str, Any]]:
    """This host's own as `ls` knows them, the others' as their leases tell: who has them, in which state."""
    here = {row["session"]: row for row in talk.list_all(this_host)}
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
    found: list[dict[str, Any]] = []
    others: list[tuple[str, leases.Standing]] = []
    for session, lease in leases.survey(leases.open_store(this_host.config)).items():
        if session.startswith(HOSTS):
            continue
        own = here.pop(session, None)
        if own is not None and (own["state"] not in ("parked", "exited") or own["token"] >= lease.token):
            found.append(own)
        elif lease.state != "free":
            others.append((session, lease))
    names = threads.each(lambda one: _name(store, ring, one[0], one[1].checkpoint), others, catalog.READERS, "names")
    found += [_row(session, lease, name.result()) for (session, lease), name in zip(others, names, strict=True)]
    return [*here.values(), *sorted(found, key=lambda row: str(row["session"]))]


def _row(session: str, lease: leases.Standing, name: str) -> dict[str, Any]:
    known = {"session": session, "name": name, "host": lease.host, "state": _STATES[lease.state], "token": lease.token}
    unknown: dict[str, Any] = {
        "clients": None,
        "idle_s": None,
        "rss": None,
        "pid": None,
        "command": [],
        "created": None,
        "note": "",
    }
    return {**known, **unknown}


def _name(store: Store, ring: KeyRing, session: str, checkpoint: str | None) -> str:
    """As its last checkpoint tells it; the lease itself knows only ids."""
    if checkpoint is None:
        return session[:12]
    try:
        return str(catalog.load(store, ring, checkpoint, session).facts.get("name", session[:12]))
    except (CheckpointNotFound, ImageRefused):
        return session[:12]
