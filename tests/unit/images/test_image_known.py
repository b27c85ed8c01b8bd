"""What a store has is found out in a moment, however much it has."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cmdop_migrate.images import catalog, index, layout, tables
from cmdop_migrate.images.keys import KeyRing
from cmdop_migrate.images.writer import ImageWriter
from cmdop_migrate.storage.base import Store
from cmdop_migrate.storage.memory import MemoryStore
from tests.unit.images.image_helpers import SMALL, Wrapped

SHARED = b"what programs are made of" * 2000


def save(store: Store, ring: KeyRing, spill: Path, session: str, parent: str | None = None, **tuning: float):
    writer = ImageWriter(store, ring, session, spill, parent, replace(SMALL, **tuning))
    writer.begin()
    writer.add_blob("own", session.encode() * 1000)
    writer.add_blob("shared", SHARED)
    return writer.commit(1, {"name": f"n{session}"})


class Noted(Wrapped):
    """Who asks for what, and how many at a time."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked: Counter[str] = Counter()

    def before(self, operation: str, name: str) -> None:
        self.asked[f"{operation} {name.partition('/')[0]}"] += 1


class Slow(Wrapped):
    """Indexes are not to be had until somebody lets them."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.let = threading.Event()

    def before(self, operation: str, name: str) -> None:
        if operation == "get" and name.startswith(layout.INDEXES):
            self.let.wait(30)


class Together(Wrapped):
    """Answers one kind of question only when three have been asked."""

    def __init__(self, inner: Store, kind: str) -> None:
        super().__init__(inner)
        self.kind = kind
        self.barrier = threading.Barrier(3, timeout=10)

    def before(self, operation: str, name: str) -> None:
        if operation == "get" and name.startswith(self.kind):
            self.barrier.wait()


@pytest.fixture
def store(ring: KeyRing, tmp_path: Path) -> MemoryStore:
    made = MemoryStore()
    for number in range(3):
        save(made, ring, tmp_path, f"5e55{number}0")
    return made


def test_the_store_is_asked_for_several_at_a_time(store, ring, tmp_path):
    found = save(Together(store, layout.INDEXES), ring, tmp_path, "5e5590")
    assert found.sizes["reused"] >= len(SHARED)
    entries = list(catalog.listed(store))[:3]
    together = Together(store, layout.MANIFESTS)
    assert [one.checkpoint for _, one in catalog.read_all(together, ring, entries)] == [e.checkpoint for e in entries]


@pytest.mark.parametrize("listed", [index.LISTED, 0])
def test_what_it_cannot_say_in_a_moment_is_sent_again(store, ring, tmp_path, monkeypatch, listed):
    """Nobody stands still for a hint; but what the session itself left is always found."""
    monkeypatch.setattr(index, "LISTED", listed)
    slow = Slow(store)
    try:
        first = save(slow, ring, tmp_path, "5e5590", patience=0.05)
        assert first.sizes["reused"] == 0
        second = save(slow, ring, tmp_path, "5e5590", first.checkpoint, patience=0.05)
    finally:
        slow.let.set()
    assert second.sizes["reused"] == second.sizes["blobs"] == first.sizes["blobs"]


def test_packs_of_a_large_store_are_asked_for_by_name(store, ring, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "LISTED", 2)
    noted = Noted(store)
    found = save(noted, ring, tmp_path, "5e5590")
    assert found.sizes["reused"] >= len(SHARED)
    assert noted.asked["list packs"] == 1 and noted.asked["stat packs"] == 3


def test_a_pack_that_is_gone_is_not_relied_on(store, ring, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "LISTED", 0)
    store.delete([info.name for info in store.list(layout.PACKS)])
    save(store, ring, tmp_path, "5e5590")
    found = save(store, ring, tmp_path, "5e5591")
    tables.check_packs(store, dict.fromkeys(found.packs, 1))
    assert found.sizes["reused"] >= len(SHARED)


def test_one_that_is_gone_since_it_was_listed_is_left_out(store, ring):
    entries = list(catalog.listed(store))
    store.delete([entries[1].name])
    store.put(entries[2].name, b"not a manifest")
    (first, good), (last, bad) = catalog.read_all(store, ring, entries)
    assert (first, last) == (entries[0], entries[2])
    assert good.checkpoint == first.checkpoint and isinstance(bad, catalog.ImageRefused)
    assert catalog.named(store, ring, entries, "n5e5500") == {"5e5500"}
