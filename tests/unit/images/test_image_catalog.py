"""Test finding a manifest by its name, by a prefix, or in another session's folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from cmdop_migrate.errors import CheckpointNotFound, ImageRefused
from cmdop_migrate.host import resources
from cmdop_migrate.images.format import layout, manifest
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.store import catalog
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.snapshot import checkpoints
from cmdop_migrate.storage.memory import MemoryStore
from tests.unit.images.image_helpers import SESSION, SMALL, checkpoint

OTHER = "ab" * 16


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.lists = 0

    def list(self, prefix: str = ""):
        self.lists += 1
        return super().list(prefix)


@pytest.fixture
def saved(ring: KeyRing, tmp_path: Path) -> tuple[Counting, manifest.Manifest]:
    store = Counting()
    writer = ImageWriter(store, ring, SESSION, tmp_path, options=SMALL)
    writer.begin()
    writer.add_blob("x", b"1")
    found = writer.commit(1)
    store.lists = 0
    return store, found


def test_checkpoint_with_full_name_is_read_without_listing(saved, ring):
    store, found = saved
    assert catalog.load(store, ring, found.checkpoint, SESSION) == found
    assert store.lists == 0


def test_checkpoint_of_another_session_or_by_prefix_is_found_by_listing(saved, ring):
    store, found = saved
    assert catalog.load(store, ring, found.checkpoint, OTHER) == found
    assert catalog.load(store, ring, found.checkpoint[:12], SESSION) == found
    assert store.lists > 0
    with pytest.raises(CheckpointNotFound):
        catalog.load(store, ring, "cd" * 16, SESSION)


def test_damaged_or_oversized_manifest_is_refused(saved, ring, monkeypatch):
    store, found = saved
    data = store.get(found.name)
    store.put(found.name, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ImageRefused):
        catalog.load(store, ring, found.checkpoint, SESSION)
    store.put(found.name, data)
    monkeypatch.setattr(manifest, "MAX_MANIFEST", len(data) - 1)
    with pytest.raises(ImageRefused, match="large"):
        catalog.load(store, ring, found.checkpoint, SESSION)


class Pruned(MemoryStore):
    """Simulate a prune on another host that removes `gone`, and its own packs, once `at` is read."""

    gone: manifest.Manifest | None = None
    own: tuple[str, ...] = ()
    at = ""

    def prune(self, gone: manifest.Manifest, others: manifest.Manifest, at: str) -> None:
        self.gone, self.own = gone, tuple(pack for pack in gone.packs if pack not in others.packs)
        self.at = at if at == "manifests/" else layout.pack_name(self.own[0])

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if self.gone is not None and name.startswith(self.at):
            gone, self.gone = self.gone, None
            self.delete([gone.name, *map(layout.pack_name, self.own)])
        return super().get(name, start, length)


@pytest.mark.parametrize("at", ["manifests/", "packs/"])
def test_checkpoint_pruned_during_a_listing_is_left_out(ring, tmp_path, monkeypatch, at):
    store = Pruned()
    kept, gone = (checkpoint(store, ring, tmp_path, seed, session) for seed, session in enumerate((SESSION, OTHER)))
    monkeypatch.setattr(resources, "open_store", lambda _: store)
    monkeypatch.setattr(resources, "open_keys", lambda _: ring)
    host = SimpleNamespace(config=None)
    store.prune(gone, kept, at)
    results = checkpoints.verify(host, None)
    assert [(result.checkpoint, result.problem) for result in results] == [(kept.checkpoint, None)]
    again = checkpoint(store, ring, tmp_path, 5, OTHER)
    store.prune(again, kept, at)
    if at == "manifests/":
        assert [row.checkpoint for row in checkpoints.listing(host, None)] == [kept.checkpoint]
    else:
        with pytest.raises(CheckpointNotFound, match="just removed"):
            checkpoints.verify(host, again.checkpoint)
