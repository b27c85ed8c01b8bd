"""List, show and verify the checkpoints of the store."""

from __future__ import annotations

from typing import Any

from cmdop_migrate.errors import CheckpointNotFound, ImageRefused
from cmdop_migrate.host import references, resources
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.read import verify as images_verify
from cmdop_migrate.images.store import catalog


def listing(this_host: Host, reference: str | None) -> list[dict[str, Any]]:
    """Oldest first. One that cannot be read is listed with its problem; left out is only what was pruned meanwhile."""
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
    session = references.session_named(this_host, reference) if reference is not None else None
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


def show(this_host: Host, reference: str) -> dict[str, Any]:
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
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


def verify(this_host: Host, reference: str | None) -> list[dict[str, Any]]:
    """One that is pruned meanwhile, on any host, is left out, unless it was asked for."""
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
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
