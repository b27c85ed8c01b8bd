"""The store's checkpoints: listed, shown, verified, pruned."""

from __future__ import annotations

import functools
from typing import Any

from cmdop_migrate.errors import CheckpointNotFound, Fenced, ImageRefused, SessionNotFound
from cmdop_migrate.flows import births, choose, leases, tools
from cmdop_migrate.images import catalog, retention
from cmdop_migrate.images import verify as images_verify
from cmdop_migrate.images.manifest import Manifest
from cmdop_migrate.images.policy import Keep
from cmdop_migrate.session.records import Records


def listing(records: Records, reference: str | None) -> list[dict[str, Any]]:
    """Oldest first. One that cannot be read is listed with its problem; left out is only what was pruned meanwhile."""
    store, ring = tools.open_store(records.config), tools.open_keys(records.config)
    session = _session(records, reference) if reference is not None else None
    rows = []
    entries = sorted(catalog.listed(store, session), key=lambda one: (one.modified, one.checkpoint))
    for entry, found in catalog.read_all(store, ring, entries):
        if isinstance(found, Manifest):
            rows.append(_row(found))
        else:
            unknown = {"name": "?", "host": "?", "token": 0, "created": entry.modified, "tag": None, "bytes": None}
            row = {"checkpoint": entry.checkpoint, "session": entry.session, **unknown, "problem": found.message}
            rows.append(row)
    return rows


def _row(manifest: Manifest) -> dict[str, Any]:
    return {
        "checkpoint": manifest.checkpoint,
        "session": manifest.session,
        "name": manifest.facts.get("name", "?"),
        "host": manifest.facts.get("host", "?"),
        "token": manifest.token,
        "created": manifest.created,
        "tag": manifest.facts.get("tag"),
        "parent": manifest.parent,
        "bytes": dict(manifest.sizes),
        "problem": None,
    }


def show(records: Records, reference: str) -> dict[str, Any]:
    store, ring = tools.open_store(records.config), tools.open_keys(records.config)
    manifest = catalog.load(store, ring, reference)
    facts = {key: manifest.facts.get(key) for key in ("kernel", "machine", "criu", "version", "live")}
    spec = manifest.facts.get("record", {}).get("spec", {})
    return {
        **_row(manifest),
        **facts,
        "key": manifest.key,
        "packs": len(manifest.packs),
        "command": spec.get("command"),
    }


def verify(records: Records, reference: str | None) -> list[dict[str, Any]]:
    """One that is pruned meanwhile, on any host, is left out, unless it was asked for."""
    store, ring = tools.open_store(records.config), tools.open_keys(records.config)
    wanted = [catalog.find(store, reference)] if reference is not None else list(catalog.listed(store))
    results = []
    for entry in wanted:
        result: dict[str, Any] = {"checkpoint": entry.checkpoint, "session": entry.session, "bytes": 0, "problem": None}
        try:
            done = images_verify.verify(store, ring, entry.checkpoint)
            result |= {"bytes": done.bytes, "packs": done.packs, "chunks": done.chunks}
        except (CheckpointNotFound, ImageRefused) as error:
            if store.stat(entry.name) is None:
                if reference is None:
                    continue
                raise CheckpointNotFound(
                    f"checkpoint {entry.checkpoint[:12]} was just removed", "See: cmdop-migrate checkpoints ls."
                ) from error
            result["problem"] = error.message
        results.append(result)
    return results


def damaged(bad: list[dict[str, Any]]) -> ImageRefused:
    words = "; ".join(f"{one['checkpoint'][:12]}: {one['problem']}" for one in bad[:5])
    return ImageRefused(
        f"{len(bad)} checkpoints are not whole, or cannot be read here: {words}",
        "Bring a key that is missing: cmdop-migrate key import. Drop what is damaged: checkpoints prune --drop ID.",
    )


def prune(
    records: Records, keep_last: int | None, keep_within: float | None, drop: tuple[str, ...], dry_run: bool
) -> dict[str, Any]:
    """The leases tell what is needed, not what this host remembers: a session that ended here may run elsewhere.

    The checkpoint a lease names stays, and so does the newest one of every session that is not known to have ended:
    one that is committed while we look is the newest. What a branch was born with stays only as long as its lease, if
    it is known, may stand there."""
    store, ring = tools.open_store(records.config), tools.open_keys(records.config)
    host_leases = leases.open_store(records.config)
    kept = births.bury(records, host_leases, store, leases.survey(host_leases), dry_run)
    ended, needed = set(), {lease.checkpoint for lease in kept.values()}
    coming = {}
    for record in records.all():
        # Parked, or running while its memory is still in the store. A branch needs what its parent's name is on.
        is_coming = (records.directory(record.session) / "image").exists()
        if record.phase == "live" and is_coming:
            coming[record.checkpoint] = record.name
        if record.phase not in ("exited", "live") or is_coming:
            needed.add(record.checkpoint)
        elif record.phase == "exited":
            ended.add(record.session)
    also = [catalog.find(store, one).checkpoint for one in drop]
    for one in also:
        leases.may_drop(records, kept, one)
        if one in coming:
            raise Fenced(
                f"session {coming[one]!r} runs, and its memory is still coming from checkpoint {one[:12]}",
                "Wait until it is here; see: cmdop-migrate ls",
            )
    done = retention.prune(
        store,
        ring,
        Keep(keep_last, keep_within),
        lambda session: not kept[session].is_over if session in kept else session not in ended,
        also=also,
        dry_run=dry_run,
        needed=needed,
        spent=lambda entry: births.is_spent(kept.get(entry.session), entry),
    )
    if done.checkpoints and not dry_run:
        records.events.emit("pruned", checkpoints=list(done.checkpoints), bytes=done.bytes)
    return {
        "checkpoints": list(done.checkpoints),
        "packs": done.packs,
        "bytes": done.bytes,
        "waiting": done.waiting,
        "unreadable": list(done.unreadable),
    }


def manifests(records: Records, session: str) -> list[Manifest]:
    """Every readable checkpoint of a session."""
    store, ring = tools.open_store(records.config), tools.open_keys(records.config)
    found = catalog.read_all(store, ring, catalog.listed(store, session))
    return [one for _, one in found if isinstance(one, Manifest)]


def _session(records: Records, reference: str) -> str:
    """One that this host knows; else one in the store, whoever saved it."""
    try:
        return records.find(reference).session
    except SessionNotFound:
        found = session_of(records, reference)
        if found is None:
            raise
        return found


def session_of(records: Records, reference: str, shortest: int = 1) -> str | None:
    """The one session in the store that has this name, or an id that begins so, of `shortest` digits or more; never of
    none, with which every id begins."""
    store, ring = tools.open_store(records.config), tools.open_keys(records.config)
    entries = list(catalog.listed(store))
    by_id = len(reference) >= shortest
    found = {entry.session for entry in entries if by_id and entry.session.startswith(reference)}
    if len(reference) < choose.SURE or not found:
        named = catalog.named(store, ring, entries, reference)
        if len(named) > 1:
            current = functools.partial(leases.last_checkpoint, leases.open_store(records.config))
            named = choose.not_over(named, current)
        found = named or found
    return found.pop() if len(found) == 1 else None
