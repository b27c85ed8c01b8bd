"""Which checkpoint is meant: by session name or id, by checkpoint id, or simply the one that is parked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from cmdop_migrate.errors import CheckpointNotFound, Fenced, SessionNotFound, Usage
from cmdop_migrate.host import leases, resources
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.store import catalog
from cmdop_migrate.model import Record
from cmdop_migrate.storage.base import Store
from cmdop_migrate.util import threads

SAME_MOMENT = 2.0
SURE = 12  # digits of an id, as `ls` shows them: nobody means a name


@dataclass(frozen=True)
class Chosen:
    """A checkpoint, and what this host knows of its session."""

    manifest: Manifest
    record: Record | None


Current = Callable[[str], str | None]


def choose(this_host: Host, store: Store, ring: KeyRing, reference: str | None, current: Current) -> Chosen:
    """`current` tells a session's last checkpoint by its lease: this host's own record may be behind."""
    if reference is None:
        return _only_one(this_host, store, ring, current)
    record = _record(this_host, reference)
    last = (current(record.session) or record.checkpoint) if record is not None else None
    if record is not None and last is not None:
        return Chosen(catalog.load(store, ring, last, record.session), record)
    if record is not None:
        newest = _newest(store, ring, record.session)
        if newest is None:
            raise CheckpointNotFound(
                f"session {record.name!r} has no checkpoint", f"Make one: cmdop-migrate checkpoint {record.name}"
            )
        return Chosen(newest, record)
    found = _in_store(store, ring, reference, current)
    return Chosen(found, this_host.load(found.session))


def not_running(chosen: Chosen) -> None:
    """Fenced when the session lives here. Whether another host has it, or had this generation, the lease tells."""
    record, manifest = chosen.record, chosen.manifest
    if record is None:
        return
    if record.phase == "live":
        raise Fenced(
            f"session {record.name!r} runs on {record.host} (token {record.token})",
            f"For a second copy under a new identity: cmdop-migrate restore {manifest.checkpoint[:12]} --fork NAME",
        )


def parked(this_host: Host) -> list[Record]:
    return [record for record in this_host.all() if record.phase == "parked"]


def _only_one(this_host: Host, store: Store, ring: KeyRing, current: Current) -> Chosen:
    here = parked(this_host)
    if len(here) == 1:
        return choose(this_host, store, ring, here[0].session, current)
    if here:
        names = ", ".join(record.name for record in here)
        raise Usage(f"several sessions are parked: {names}", "Name one, or restore them all with --all.")
    known = {record.session for record in this_host.all()}
    # A branch that has no checkpoint of its own is brought back by its name: it runs, or is over, as a rule.
    strangers = {entry.session for entry in catalog.listed(store) if not entry.is_fork} - known
    if len(strangers) == 1:
        return choose(this_host, store, ring, strangers.pop(), current)
    if strangers:
        some = ", ".join(sorted(one[:12] for one in strangers)[:8])
        raise Usage(f"the store holds several sessions: {some}", "Name one. See: cmdop-migrate checkpoints ls")
    raise SessionNotFound("no session is parked", "See: cmdop-migrate checkpoints ls")


def not_over(sessions: set[str], current: Current) -> set[str]:
    """Of several that are called alike those that may be brought back by their leases, if there are any."""
    if len(sessions) < 2:
        return sessions
    named = sorted(sessions)
    found = threads.each(current, named, catalog.READERS, "leases")
    return {one for one, last in zip(named, found, strict=True) if last.result() is not None} or sessions


def _record(this_host: Host, reference: str) -> Record | None:
    try:
        return this_host.find(reference)
    except SessionNotFound:
        return None


def _newest(store: Store, ring: KeyRing, session: str) -> Manifest | None:
    """Stores tell times to the second: among those of the last moment the manifests themselves decide."""
    entries = list(catalog.listed(store, session))
    last = max((one.modified for one in entries), default=0.0)
    read = [catalog.read(store, ring, one) for one in entries if one.modified >= last - SAME_MOMENT]
    return max(read, key=lambda one: (one.token, one.created), default=None)


def _in_store(store: Store, ring: KeyRing, reference: str, current: Current) -> Manifest:
    entries = list(catalog.listed(store)) if reference else []  # every id begins with nothing
    by_checkpoint = [one for one in entries if one.checkpoint.startswith(reference)]
    sessions = {one.session for one in entries if one.session.startswith(reference)}
    is_id = len(reference) >= SURE and (by_checkpoint or sessions)
    named = set() if is_id else not_over(catalog.named(store, ring, entries, reference), current)
    if named:  # `db` is the name of a session, and somebody else's checkpoint may begin so
        by_checkpoint, sessions = [], named
    if len(by_checkpoint) == 1 and not sessions:
        return catalog.read(store, ring, by_checkpoint[0])
    if len(sessions) == 1 and not by_checkpoint:
        session = sessions.pop()
        last = current(session)
        if last is not None:
            return catalog.load(store, ring, last, session)
        newest = _newest(store, ring, session)
        if newest is not None:
            return newest
    if by_checkpoint or sessions:
        some = ", ".join([*sorted(one[:12] for one in sessions), *(one.checkpoint[:16] for one in by_checkpoint)])
        raise Usage(f"{reference!r} is ambiguous: {some}", "Give more of the id.")
    raise SessionNotFound(
        f"no session or checkpoint {reference!r} here or in {store.url}", "See: cmdop-migrate checkpoints ls"
    )


def manifests(this_host: Host, session: str) -> list[Manifest]:
    """Every readable checkpoint of a session."""
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
    found = catalog.read_all(store, ring, catalog.listed(store, session))
    return [one for _, one in found if isinstance(one, Manifest)]


def session_named(this_host: Host, reference: str) -> str:
    """One that this host knows; else one in the store, whoever saved it."""
    try:
        return this_host.find(reference).session
    except SessionNotFound:
        found = session_of(this_host, reference)
        if found is None:
            raise
        return found


def session_of(this_host: Host, reference: str, shortest: int = 1) -> str | None:
    """The one session in the store that has this name, or an id that begins so, of `shortest` digits or more; never of
    none, with which every id begins."""
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
    entries = list(catalog.listed(store))
    by_id = len(reference) >= shortest
    found = {entry.session for entry in entries if by_id and entry.session.startswith(reference)}
    if len(reference) < SURE or not found:
        named = catalog.named(store, ring, entries, reference)
        if len(named) > 1:
            current = functools.partial(leases.last_checkpoint, leases.open_store(this_host.config))
            named = not_over(named, current)
        found = named or found
    return found.pop() if len(found) == 1 else None
