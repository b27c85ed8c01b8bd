"""The store's checkpoints: listed, shown, verified, pruned."""

from __future__ import annotations

from typing import Any

from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.flows import tools
from cmdop_migrate.images import catalog, retention
from cmdop_migrate.images import verify as images_verify
from cmdop_migrate.images.manifest import Manifest
from cmdop_migrate.images.policy import Keep
from cmdop_migrate.session.records import Records


def listing(records: Records, reference: str | None) -> list[dict[str, Any]]:
    """Oldest first. One that cannot be read is listed with its problem, never left out."""
    store, ring = tools.open_store(records.config), tools.open_keys(records.config)
    session = records.find(reference).session if reference else None
    rows = []
    for entry in sorted(catalog.listed(store, session), key=lambda one: (one.modified, one.checkpoint)):
        try:
            rows.append(_row(catalog.read(store, ring, entry)))
        except ImageRefused as error:
            unknown = {"name": "?", "host": "?", "token": 0, "created": entry.modified, "tag": None, "bytes": None}
            row = {"checkpoint": entry.checkpoint, "session": entry.session, **unknown, "problem": error.message}
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
    store, ring = tools.open_store(records.config), tools.open_keys(records.config)
    wanted = [catalog.find(store, reference)] if reference is not None else list(catalog.listed(store))
    results = []
    for entry in wanted:
        result: dict[str, Any] = {"checkpoint": entry.checkpoint, "session": entry.session, "bytes": 0, "problem": None}
        try:
            done = images_verify.verify(store, ring, entry.checkpoint)
            result |= {"bytes": done.bytes, "packs": done.packs, "chunks": done.chunks}
        except ImageRefused as error:
            result["problem"] = error.message
        results.append(result)
    return results


def damaged(bad: list[dict[str, Any]]) -> ImageRefused:
    words = "; ".join(f"{one['checkpoint'][:12]}: {one['problem']}" for one in bad[:5])
    return ImageRefused(
        f"{len(bad)} checkpoints would not restore: {words}", "Drop them with: checkpoints prune --drop ID"
    )


def prune(
    records: Records, keep_last: int | None, keep_within: float | None, drop: tuple[str, ...], dry_run: bool
) -> dict[str, Any]:
    """A session this host does not know to have ended counts as parked: its newest checkpoint may be all there is."""
    store, ring = tools.open_store(records.config), tools.open_keys(records.config)
    over, needed = set(), set()
    for record in records.all():
        # Parked, or running while its memory is still in the store. A branch needs what its parent's name is on.
        if record.phase not in ("exited", "live") or (records.directory(record.session) / "image").exists():
            needed.add(record.checkpoint)
        else:
            over.add(record.session)
    also = [catalog.find(store, one).checkpoint for one in drop]
    keep = Keep(keep_last, keep_within)
    done = retention.prune(
        store, ring, keep, lambda session: session not in over, also=also, dry_run=dry_run, needed=needed
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
