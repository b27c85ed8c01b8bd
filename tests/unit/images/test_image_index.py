"""Test that finding out what a store has is quick, however much it has."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.chunk_table import ChunkTable
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.seal import Sealer
from cmdop_migrate.images.read import load_table
from cmdop_migrate.images.store import catalog, index, index_cache
from cmdop_migrate.images.store.index_cache import IndexCache
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.storage.base import Store
from cmdop_migrate.storage.memory import MemoryStore
from tests.unit.images.image_helpers import SMALL, Wrapped

SHARED = b"what programs are made of" * 2000


def save(
    store: Store,
    ring: KeyRing,
    spill: Path,
    session: str,
    parent: str | None = None,
    ledgers: Path | None = None,
    **options: float,
):
    writer = ImageWriter(store, ring, session, spill, parent, replace(SMALL, index_caches=ledgers, **options))
    writer.begin()
    writer.add_blob("own", session.encode() * 1000)
    writer.add_blob("shared", SHARED)
    return writer.commit(1, {"name": f"n{session}"})


class Noted(Wrapped):
    """Record requests, and how many run at a time."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked: Counter[str] = Counter()

    def before(self, operation: str, name: str) -> None:
        self.asked[f"{operation} {name.partition('/')[0]}"] += 1


class Slow(Wrapped):
    """Delay reads of indexes until the test releases them."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.let = threading.Event()

    def before(self, operation: str, name: str) -> None:
        if operation == "get" and name.startswith(layout.INDEXES):
            self.let.wait(30)


class Together(Wrapped):
    """Answer one kind of request only after three have arrived."""

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


def test_indexes_are_read_concurrently(store, ring, tmp_path):
    found = save(Together(store, layout.INDEXES), ring, tmp_path, "5e5590")
    assert found.sizes["reused"] >= len(SHARED)
    entries = list(catalog.listed(store))[:3]
    together = Together(store, layout.MANIFESTS)
    assert [one.checkpoint for _, one in catalog.read_all(together, ring, entries)] == [e.checkpoint for e in entries]


def test_cached_index_is_not_read_again(store, ring, tmp_path):
    """Read each index once per host, except its own last one, which the parent's table makes needless."""
    noted = Noted(store)
    first = save(noted, ring, tmp_path, "5e5590", ledgers=tmp_path / "ledgers")
    assert first.sizes["reused"] >= len(SHARED) and noted.asked["get index"] == 3
    other = save(noted, ring, tmp_path, "5e5591", ledgers=tmp_path / "ledgers")
    assert other.sizes["reused"] >= len(SHARED) and noted.asked["get index"] == 4
    save(noted, ring, tmp_path, "5e5591", other.checkpoint, ledgers=tmp_path / "ledgers")
    assert noted.asked["get index"] == 4


def test_indexes_not_read_in_time_are_read_by_the_next_checkpoint(store, ring, tmp_path):
    """Bound the wait for a hint; chunks of the session itself are always found."""
    slow, ledgers = Slow(store), tmp_path / "ledgers"
    try:
        first = save(slow, ring, tmp_path, "5e5590", ledgers=ledgers, index_timeout=0.05)
        assert first.sizes["reused"] == 0
        second = save(slow, ring, tmp_path, "5e5590", first.checkpoint, ledgers=ledgers, index_timeout=0.05)
    finally:
        slow.let.set()
    assert second.sizes["reused"] == second.sizes["blobs"] == first.sizes["blobs"]
    assert save(store, ring, tmp_path, "5e5591", ledgers=ledgers).sizes["reused"] >= len(SHARED)


def test_no_index_is_read_when_the_cache_is_broken(store, ring, tmp_path, monkeypatch):
    """Let another checkpoint of this host hold the write lock and never end."""
    monkeypatch.setattr(index, "READERS", 1)
    ledgers = tmp_path / "ledgers"
    path = index_cache.path_of(ledgers, store.url, ring.current)
    IndexCache(ring.current, path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    noted = Noted(store)
    assert save(noted, ring, tmp_path, "5e5590", ledgers=ledgers).sizes["reused"] == 0
    assert noted.asked["get index"] == 1
    other.execute("ROLLBACK")
    other.close()
    assert save(noted, ring, tmp_path, "5e5591", ledgers=ledgers).sizes["reused"] >= len(SHARED)


def test_rewritten_index_is_read_again(store, ring, tmp_path):
    """Grow the index of an upload in progress."""
    ledgers = tmp_path / "ledgers"
    whole = next(store.list(layout.INDEXES))
    data = store.get(whole.name)
    key, _ = index.decode(layout.last_part(whole.name), data, ring)
    store.delete([info.name for info in store.list(layout.INDEXES)])
    store.put(whole.name, index.encode(layout.last_part(whole.name), ChunkTable(), Sealer(key)))
    noted = Noted(store)
    session = "5e5500"  # whose index that is, or one of its neighbours': all of them have what is shared
    save(noted, ring, tmp_path, session, ledgers=ledgers)
    store.put(whole.name, data)
    asked = noted.asked["get index"]
    found = save(noted, ring, tmp_path, "5e5591", ledgers=ledgers)
    assert noted.asked["get index"] == asked + 2 and found.sizes["reused"] >= len(SHARED)


def test_packs_of_a_large_store_are_listed_by_first_digit(store, ring, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "LISTED", 0)
    noted = Noted(store)
    found = save(noted, ring, tmp_path, "5e5590")
    assert found.sizes["reused"] >= len(SHARED)
    assert noted.asked["list packs"] == 1 + len(index.DIGITS) and noted.asked["stat packs"] == 0
    assert index.usable_packs(store, ()) == {layout.pack_of(info.name) for info in store.list(layout.PACKS)}


@pytest.mark.parametrize("listed", [index.LISTED, 0])
def test_missing_pack_is_not_relied_on(store, ring, tmp_path, monkeypatch, listed):
    monkeypatch.setattr(index, "LISTED", listed)
    ledgers = tmp_path / "ledgers"
    save(store, ring, tmp_path, "5e5592", ledgers=ledgers)
    store.delete([info.name for info in store.list(layout.PACKS)])
    assert save(store, ring, tmp_path, "5e5590", ledgers=ledgers).sizes["reused"] == 0
    found = save(store, ring, tmp_path, "5e5591", ledgers=ledgers)
    load_table.check_packs(store, dict.fromkeys(found.packs, 1))
    assert found.sizes["reused"] >= len(SHARED)


def test_packs_of_an_interrupted_upload_are_indexed_once(store, ring, tmp_path):
    """Read the trailers of packs that no index names."""
    store.delete([info.name for info in store.list(layout.INDEXES)])
    store.put(layout.pack_name(layout.new_id()), b"of no key that we have")
    noted, ledgers = Noted(store), tmp_path / "ledgers"
    assert save(noted, ring, tmp_path, "5e5590", ledgers=ledgers).sizes["reused"] >= len(SHARED)
    asked = noted.asked["get packs"]
    assert asked >= 4
    assert save(noted, ring, tmp_path, "5e5591", ledgers=ledgers).sizes["reused"] >= len(SHARED)
    assert noted.asked["get packs"] == asked


def test_index_deleted_after_listing_is_left_out(store, ring):
    entries = list(catalog.listed(store))
    store.delete([entries[1].name])
    store.put(entries[2].name, b"not a manifest")
    (first, good), (last, bad) = catalog.read_all(store, ring, entries)
    assert (first, last) == (entries[0], entries[2])
    assert good.checkpoint == first.checkpoint and isinstance(bad, catalog.ImageRefused)
    assert catalog.named(store, ring, entries, "n5e5500") == {"5e5500"}
