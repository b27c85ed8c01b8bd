"""Resolve a user's reference to a session and a checkpoint: a session's name or id, a checkpoint's id, or nothing for
the only parked session."""

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

SAME_MOMENT = 2.0  # seconds within which the times of two manifests cannot be compared
ID_DIGITS = 12  # digits of an id, as `ls` shows them: a reference of that length is not a name


@dataclass(frozen=True)
class Chosen:
    """Hold a checkpoint, and this host's record of its session."""

    manifest: Manifest
    record: Record | None


Current = Callable[[str], str | None]


def choose(this_host: Host, store: Store, ring: KeyRing, reference: str | None, current: Current) -> Chosen:
    """Return the checkpoint that `reference` means. `current` returns a session's last checkpoint by its lease: this
    host's own record may be outdated. Raise SessionNotFound, CheckpointNotFound, or Usage if the reference is
    ambiguous."""
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
    manifest = _in_store(store, ring, reference, current)
    return Chosen(manifest, this_host.load(manifest.session))


def not_running(chosen: Chosen) -> None:
    """Raise Fenced if the session runs here. Whether another host has it, or had this generation, its lease tells."""
    record, manifest = chosen.record, chosen.manifest
    if record is None:
        return
    if record.phase == "live":
        raise Fenced(
            f"session {record.name!r} runs on {record.host} (token {record.token})",
            f"For a second copy under a new identity: cmdop-migrate restore {manifest.checkpoint[:12]} --fork NAME",
        )


def parked(this_host: Host) -> list[Record]:
    """Return the records of the sessions that are parked here."""
    return [record for record in this_host.all() if record.phase == "parked"]


def _only_one(this_host: Host, store: Store, ring: KeyRing, current: Current) -> Chosen:
    """Return the checkpoint of the only parked session, or of the only session in the store that this host does not
    know."""
    here = parked(this_host)
    if len(here) == 1:
        return choose(this_host, store, ring, here[0].session, current)
    if here:
        names = ", ".join(record.name for record in here)
        raise Usage(f"several sessions are parked: {names}", "Name one, or restore them all with --all.")
    known = {record.session for record in this_host.all()}
    # A fork that has only its initial checkpoint usually runs or has ended: it is restored by name only.
    strangers = {entry.session for entry in catalog.listed(store) if not entry.is_fork} - known
    if len(strangers) == 1:
        return choose(this_host, store, ring, strangers.pop(), current)
    if strangers:
        some = ", ".join(sorted(session[:12] for session in strangers)[:8])
        raise Usage(f"the store holds several sessions: {some}", "Name one. See: cmdop-migrate checkpoints ls")
    raise SessionNotFound("no session is parked", "See: cmdop-migrate checkpoints ls")


def not_over(sessions: set[str], current: Current) -> set[str]:
    """Return those of several sessions of one name that can be restored by their leases; all of them if none can."""
    if len(sessions) < 2:
        return sessions
    ordered = sorted(sessions)
    checkpoints = threads.each(current, ordered, catalog.READERS, "leases")
    return {one for one, last in zip(ordered, checkpoints, strict=True) if last.result() is not None} or sessions


def _record(this_host: Host, reference: str) -> Record | None:
    try:
        return this_host.find(reference)
    except SessionNotFound:
        return None


def _newest(store: Store, ring: KeyRing, session: str) -> Manifest | None:
    """Return the newest manifest of a session. Stores keep times to the second: the manifests of the last moment are
    compared by their content."""
    entries = list(catalog.listed(store, session))
    last = max((entry.modified for entry in entries), default=0.0)
    read = [catalog.read(store, ring, entry) for entry in entries if entry.modified >= last - SAME_MOMENT]
    return max(read, key=lambda manifest: (manifest.token, manifest.created), default=None)


def _in_store(store: Store, ring: KeyRing, reference: str, current: Current) -> Manifest:
    """Return the manifest in the store that `reference` means. A name goes before a prefix of an id that is shorter
    than ID_DIGITS."""
    entries = list(catalog.listed(store)) if reference else []  # an empty reference is a prefix of every id
    by_checkpoint = [entry for entry in entries if entry.checkpoint.startswith(reference)]
    sessions = {entry.session for entry in entries if entry.session.startswith(reference)}
    is_id = len(reference) >= ID_DIGITS and (by_checkpoint or sessions)
    named = set() if is_id else not_over(catalog.named(store, ring, entries, reference), current)
    if named:  # `db` is the name of a session, and may be a prefix of another session's checkpoint
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
        some = ", ".join(
            [*sorted(session[:12] for session in sessions), *(entry.checkpoint[:16] for entry in by_checkpoint)]
        )
        raise Usage(f"{reference!r} is ambiguous: {some}", "Give more of the id.")
    raise SessionNotFound(
        f"no session or checkpoint {reference!r} here or in {store.url}", "See: cmdop-migrate checkpoints ls"
    )


def manifests(this_host: Host, session: str) -> list[Manifest]:
    """Return every readable manifest of a session."""
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
    results = catalog.read_all(store, ring, catalog.listed(store, session))
    return [manifest for _, manifest in results if isinstance(manifest, Manifest)]


def session_named(this_host: Host, reference: str) -> str:
    """Return the id of a session that this host knows, or else of one in the store, saved by any host. Raise
    SessionNotFound."""
    try:
        return this_host.find(reference).session
    except SessionNotFound:
        session = session_of(this_host, reference)
        if session is None:
            raise
        return session


def session_of(this_host: Host, reference: str, shortest: int = 1) -> str | None:
    """Return the only session in the store that has this name, or an id with this prefix of at least `shortest` digits;
    None if no session matches, or several do."""
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
    entries = list(catalog.listed(store))
    by_id = len(reference) >= shortest
    sessions = {entry.session for entry in entries if by_id and entry.session.startswith(reference)}
    if len(reference) < ID_DIGITS or not sessions:
        named = catalog.named(store, ring, entries, reference)
        if len(named) > 1:
            current = functools.partial(leases.last_checkpoint, leases.open_store(this_host.config))
            named = not_over(named, current)
        sessions = named or sessions
    return sessions.pop() if len(sessions) == 1 else None
