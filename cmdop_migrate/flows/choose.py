"""Which checkpoint is meant: by session name or id, by checkpoint id, or simply the one that is parked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cmdop_migrate.errors import CheckpointNotFound, Fenced, ImageRefused, SessionNotFound, Usage
from cmdop_migrate.images import catalog
from cmdop_migrate.images.catalog import Listed
from cmdop_migrate.images.keys import KeyRing
from cmdop_migrate.images.manifest import Manifest
from cmdop_migrate.model import Record
from cmdop_migrate.session.records import Records
from cmdop_migrate.storage.base import Store

SAME_MOMENT = 2.0


@dataclass(frozen=True)
class Chosen:
    """A checkpoint, and what this host knows of its session."""

    manifest: Manifest
    record: Record | None


def choose(records: Records, store: Store, ring: KeyRing, reference: str | None) -> Chosen:
    if reference is None:
        return _only_one(records, store, ring)
    record = _record(records, reference)
    if record is not None and record.phase == "parked" and record.checkpoint:
        return Chosen(catalog.load(store, ring, record.checkpoint, record.session), record)
    if record is not None:
        newest = _newest(store, ring, record.session)
        if newest is None:
            raise CheckpointNotFound(
                f"session {record.name!r} has no checkpoint", f"Make one: cmdop-migrate checkpoint {record.name}"
            )
        return Chosen(newest, record)
    found = _in_store(store, ring, reference)
    return Chosen(found, records.load(found.session))


def not_running(chosen: Chosen) -> None:
    """Fenced when the session lives here, or this generation of it was restored before."""
    record, manifest = chosen.record, chosen.manifest
    if record is None:
        return
    if record.phase == "live":
        raise Fenced(
            f"session {record.name!r} runs on {record.host} (token {record.token})",
            f"For a second copy under a new identity: cmdop-migrate restore {manifest.checkpoint[:12]} --fork NAME",
        )
    still_there = record.phase == "parked" and record.checkpoint == manifest.checkpoint
    if record.token > manifest.token and not still_there:
        raise Fenced(
            f"checkpoint {manifest.checkpoint[:12]} was restored already, as token {record.token} on {record.host}",
            f"Restore a later one, or a copy: cmdop-migrate restore {manifest.checkpoint[:12]} --fork NAME",
        )


def parked(records: Records) -> list[Record]:
    return [record for record in records.all() if record.phase == "parked"]


def _only_one(records: Records, store: Store, ring: KeyRing) -> Chosen:
    here = parked(records)
    if len(here) == 1:
        return choose(records, store, ring, here[0].session)
    if here:
        names = ", ".join(record.name for record in here)
        raise Usage(f"several sessions are parked: {names}", "Name one, or restore them all with --all.")
    known = {record.session for record in records.all()}
    strangers = {entry.session for entry in catalog.listed(store)} - known
    if len(strangers) == 1:
        return choose(records, store, ring, strangers.pop())
    if strangers:
        some = ", ".join(sorted(one[:12] for one in strangers)[:8])
        raise Usage(f"the store holds several sessions: {some}", "Name one. See: cmdop-migrate checkpoints ls")
    raise SessionNotFound("no session is parked", "See: cmdop-migrate checkpoints ls")


def _record(records: Records, reference: str) -> Record | None:
    try:
        return records.find(reference)
    except SessionNotFound:
        return None


def _newest(store: Store, ring: KeyRing, session: str) -> Manifest | None:
    """Stores tell times to the second: among those of the last moment the manifests themselves decide."""
    entries = list(catalog.listed(store, session))
    last = max((one.modified for one in entries), default=0.0)
    read = [catalog.read(store, ring, one) for one in entries if one.modified >= last - SAME_MOMENT]
    return max(read, key=lambda one: (one.token, one.created), default=None)


def _in_store(store: Store, ring: KeyRing, reference: str) -> Manifest:
    entries = list(catalog.listed(store))
    by_checkpoint = [one for one in entries if one.checkpoint.startswith(reference)]
    if len(by_checkpoint) == 1:
        return catalog.read(store, ring, by_checkpoint[0])
    sessions = {one.session for one in entries if one.session.startswith(reference)}
    sessions = sessions or _by_name(store, ring, entries, reference)
    if len(sessions) == 1:
        newest = _newest(store, ring, sessions.pop())
        if newest is not None:
            return newest
    if by_checkpoint or sessions:
        some = ", ".join(sorted(one[:12] for one in sessions) or [one.checkpoint[:16] for one in by_checkpoint])
        raise Usage(f"{reference!r} is ambiguous: {some}", "Give more of the id.")
    raise SessionNotFound(
        f"no session or checkpoint {reference!r} here or in {store.url}", "See: cmdop-migrate checkpoints ls"
    )


def _by_name(store: Store, ring: KeyRing, entries: Iterable[Listed], name: str) -> set[str]:
    found = set()
    for entry in entries:
        try:
            if catalog.read(store, ring, entry).facts.get("name") == name:
                found.add(entry.session)
        except (CheckpointNotFound, ImageRefused):
            continue  # somebody else's, or damaged: it cannot be the one that was meant
    return found
