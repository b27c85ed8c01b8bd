"""List, show and verify the checkpoints of the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cmdop_migrate.errors import CheckpointNotFound, ImageRefused
from cmdop_migrate.host import references, resources
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.read import verify as images_verify
from cmdop_migrate.images.store import catalog


@dataclass(frozen=True)
class CheckpointInfo:
    """Describe a checkpoint as `checkpoints ls` lists it. `problem` says why its manifest cannot be read."""

    checkpoint: str
    session: str
    name: str
    host: str
    token: int
    created: float
    tag: str | None
    parent: str | None
    bytes: dict[str, int] | None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return one row of `checkpoints ls --json`."""
        return asdict(self)


@dataclass(frozen=True)
class VerifyResult:
    """Describe one verified checkpoint. `problem` says what is wrong with it."""

    checkpoint: str
    session: str
    bytes: int = 0
    problem: str | None = None
    packs: int | None = None
    chunks: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return one row of `checkpoints verify --json`. A damaged checkpoint has no counts."""
        return {key: value for key, value in asdict(self).items() if key == "problem" or value is not None}


def listing(this_host: Host, reference: str | None) -> list[CheckpointInfo]:
    """List checkpoints, oldest first. One that cannot be read is listed with its problem; one that was pruned during
    the listing is left out."""
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
    session = references.session_named(this_host, reference) if reference is not None else None
    rows = []
    entries = sorted(catalog.listed(store, session), key=lambda entry: (entry.modified, entry.checkpoint))
    for entry, manifest in catalog.read_all(store, ring, entries):
        if isinstance(manifest, Manifest):
            rows.append(_info(manifest))
        else:
            unreadable = CheckpointInfo(
                checkpoint=entry.checkpoint,
                session=entry.session,
                name="?",
                host="?",
                token=0,
                created=entry.modified,
                tag=None,
                parent=None,
                bytes=None,
                problem=manifest.message,
            )
            rows.append(unreadable)
    return rows


def _info(manifest: Manifest) -> CheckpointInfo:
    return CheckpointInfo(
        checkpoint=manifest.checkpoint,
        session=manifest.session,
        name=manifest.facts.get("name", "?"),
        host=manifest.facts.get("host", "?"),
        token=manifest.token,
        created=manifest.created,
        tag=manifest.facts.get("tag"),
        parent=manifest.parent,
        bytes=dict(manifest.sizes),
    )


def show(this_host: Host, reference: str) -> dict[str, Any]:
    """Return the facts of one checkpoint, as `checkpoints show --json` prints them."""
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
    manifest = catalog.load(store, ring, reference)
    facts = {key: manifest.facts.get(key) for key in ("kernel", "machine", "criu", "version", "live")}
    spec = manifest.facts.get("record", {}).get("spec", {})
    return {
        **_info(manifest).to_json(),
        **facts,
        "key": manifest.key,
        "packs": len(manifest.packs),
        "command": spec.get("command"),
    }


def verify(this_host: Host, reference: str | None) -> list[VerifyResult]:
    """Read every byte of one checkpoint, or of all. One that is pruned meanwhile, on any host, is left out; if it was
    named, raise CheckpointNotFound."""
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
    entries = [catalog.find(store, reference)] if reference is not None else list(catalog.listed(store))
    results = []
    for entry in entries:
        try:
            done = images_verify.verify(store, ring, entry.checkpoint)
            result = VerifyResult(entry.checkpoint, entry.session, done.bytes, None, done.packs, done.chunks)
        except (CheckpointNotFound, ImageRefused) as error:
            if store.stat(entry.name) is None:
                if reference is None:
                    continue
                raise CheckpointNotFound(
                    f"checkpoint {entry.checkpoint[:12]} was just removed", "See: cmdop-migrate checkpoints ls."
                ) from error
            result = VerifyResult(entry.checkpoint, entry.session, problem=error.message)
        results.append(result)
    return results


def damaged(results: Sequence[VerifyResult]) -> ImageRefused:
    """Return the error for checkpoints that failed to verify."""
    words = "; ".join(f"{result.checkpoint[:12]}: {result.problem}" for result in results[:5])
    return ImageRefused(
        f"{len(results)} checkpoints are damaged, or cannot be read here: {words}",
        "Import a key that is missing: cmdop-migrate key import. Remove a damaged one: checkpoints prune --drop ID.",
    )
