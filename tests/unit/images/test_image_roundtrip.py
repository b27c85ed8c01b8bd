"""Test that an image gives back what was written, and that the store holds each chunk once."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from image_helpers import SESSION, SMALL, Dying, Wrapped, add_run, checkpoint, content, memory, read_all

from cmdop_migrate.errors import CheckpointNotFound, ImageRefused, StoreUnreachable
from cmdop_migrate.images.format import keys, layout
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.read import ranges, reader
from cmdop_migrate.images.read.verify import verify
from cmdop_migrate.images.store import catalog, index
from cmdop_migrate.images.write.writer import ImageWriter, WriterOptions
from cmdop_migrate.storage.memory import MemoryStore


def test_image_round_trips(store, ring, spill, tmp_path):
    found = checkpoint(store, ring, spill, seed=3)
    got = read_all(store, ring, found.checkpoint, tmp_path / "local")
    assert got["process-1@7f0000003000"] == memory(3)
    assert got["criu/core-1.img"] == b"core" * 100 + bytes([3])
    assert found.facts == {"seed": 3, "shared": 0}
    assert found.sizes["memory"] == len(memory(3))


def test_segments_without_bytes_are_kept_as_such(store, ring, spill, tmp_path):
    found = checkpoint(store, ring, spill)
    image = reader.fetch(store, ring, found.checkpoint, tmp_path)
    pages = image.pages("process-1")
    assert [(s.vaddr, s.pages, s.flags, s.present) for s in pages.segments] == [
        (0x10000, 3, 1, False),
        (0x7F0000003000, 40, 4, True),
    ]
    assert pages.read(0x10000, 1) == []
    assert pages.read(0x7F0000003000 + 39 * 4096, 5)[0] == memory(1)[39 * 4096 :]
    image.close()


def test_second_checkpoint_sends_only_changes(store, ring, spill):
    shared = os.urandom(64 << 16)
    first = checkpoint(store, ring, spill, seed=1, shared=shared)
    second = checkpoint(store, ring, spill, seed=1, shared=shared, parent=first.checkpoint)
    assert first.sizes["new"] > len(shared)
    assert second.sizes["new"] < 10_000
    other = checkpoint(store, ring, spill, seed=1, shared=shared, session="abe0")
    assert other.sizes["new"] < 10_000


def test_the_store_sees_no_content_and_no_name(store, ring, spill):
    checkpoint(store, ring, spill)
    for name, (data, _) in store._objects.items():
        assert b"a line of text" not in data and b"process-1" not in data and b"core-1" not in data, name


def test_rotated_key_ring_reads_old_and_writes_new_images(store, ring, spill, tmp_path):
    old = checkpoint(store, ring, spill, seed=1)
    rotated = KeyRing((keys.new_key(), *ring.keys))
    new = checkpoint(store, rotated, spill, seed=1, parent=old.checkpoint)
    assert new.key != old.key
    assert set(new.packs).isdisjoint(old.packs), "ids of two keys never mix"
    for found in (old, new):
        assert verify(store, rotated, found.checkpoint).chunks
    with pytest.raises(ImageRefused, match="key"):
        reader.fetch(store, ring, new.checkpoint, tmp_path)


def test_changed_local_copy_is_refused(store, ring, spill, tmp_path):
    found = checkpoint(store, ring, spill)
    image = reader.fetch(store, ring, found.checkpoint, tmp_path / "local", parallel=2)
    assert content(image) == read_all(store, ring, found.checkpoint, tmp_path / "other")
    data = bytearray((tmp_path / "local" / "chunks").read_bytes())
    data[100] ^= 1
    (tmp_path / "local" / "chunks").write_bytes(data)
    with pytest.raises(ImageRefused):
        content(image)
    image.close()


def test_checkpoint_is_found_by_unique_prefix(store, ring, spill):
    found = checkpoint(store, ring, spill)
    assert catalog.load(store, ring, found.checkpoint[:8]).checkpoint == found.checkpoint
    with pytest.raises(CheckpointNotFound):
        catalog.load(store, ring, "ffff" * 8)


@pytest.mark.parametrize("count", range(3, 30, 2))
def test_upload_interrupted_anywhere_publishes_nothing_or_all(store, ring, spill, tmp_path, count):
    try:
        checkpoint(Dying(store, count), ring, spill, shared=os.urandom(20 << 20))
    except StoreUnreachable:
        pass
    for entry in catalog.listed(store):
        assert verify(store, ring, entry.checkpoint)


def test_packs_of_an_interrupted_upload_are_reused_by_the_next(store, ring, spill):
    shared = os.urandom(40 << 20)
    writer = ImageWriter(store, ring, SESSION, spill, None, SMALL)
    writer.begin()
    add_run(writer, "process-1", 0x7F0000003000, len(shared) // 4096, 4, shared)
    writer.finish_input()
    writer._uploads.wait_stored()
    writer.abort()
    assert not list(store.list(layout.UPLOADS)) and not list(catalog.listed(store))
    sent = sum(info.size for info in store.list(layout.PACKS))
    assert sent > 30 << 20
    again = checkpoint(store, ring, spill, shared=shared)
    assert again.sizes["new"] < 16 << 20


def test_periodic_index_serves_after_an_upload_without_final_index(store, ring, spill):
    """Make the store fail for good in the middle: not even `abort` can write to it."""
    shared = os.urandom(100 << 20)
    dying = Dying(store, 4 + 11)
    with pytest.raises(StoreUnreachable):
        checkpoint(dying, ring, spill, shared=shared)
    again = checkpoint(store, ring, spill, shared=shared)
    assert again.sizes["new"] < len(shared) - (60 << 20)


def test_index_can_be_rebuilt_from_packs(store, ring, spill):
    found = checkpoint(store, ring, spill)
    _, table = index.decode(found.checkpoint, store.get(layout.index_name(found.checkpoint)), ring)
    rebuilt = index.rebuild(store, ring.current, found.packs)
    assert set(table.rows()) <= set(rebuilt.rows())


def test_slow_store_does_not_delay_the_input(store, ring, spill):
    gate = threading.Event()

    class Stuck(Wrapped):
        def before(self, operation: str, name: str) -> None:
            if name.startswith(layout.PACKS) and operation == "put":
                assert gate.wait(60)

    writer = ImageWriter(
        Stuck(store), ring, SESSION, spill, None, WriterOptions(workers=2, uploaders=2, pack_buffers=4)
    )
    writer.begin()
    data = os.urandom(160 << 20)
    add_run(writer, "process-1", 0, len(data) // 4096, 4, data)
    writer.end_input()  # returns though not one pack could be put
    assert writer._uploads.spilled > 20 << 20
    gate.set()
    found = writer.commit(1)
    assert verify(store, ring, found.checkpoint)
    assert list(spill.iterdir()) == []


def test_full_disk_makes_the_input_wait_for_the_store(store, ring, spill, monkeypatch):
    def full(*_args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cmdop_migrate.images.write.upload_queue.bulk_io.write", full)
    writer = ImageWriter(store, ring, SESSION, spill, None, WriterOptions(workers=2, uploaders=1, pack_buffers=3))
    writer.begin()
    data = os.urandom(80 << 20)
    add_run(writer, "process-1", 0, len(data) // 4096, 4, data)
    found = writer.commit(1)
    monkeypatch.undo()
    assert verify(store, ring, found.checkpoint)


def test_failed_upload_raises_in_the_feeding_thread(ring, spill):
    class Broken(Wrapped):
        def before(self, operation: str, name: str) -> None:
            if name.startswith(layout.PACKS) and operation == "put":
                raise StoreUnreachable("cut", "none")

    writer = ImageWriter(Broken(MemoryStore()), ring, SESSION, spill, None, SMALL)
    writer.begin()
    data = os.urandom(8 << 20)
    with pytest.raises(StoreUnreachable):
        for at in range(100):
            add_run(writer, "process-1", at << 24, len(data) // 4096, 4, data)
    writer.abort()


def test_lazy_image_reads_before_all_is_local_and_survives_a_stall(store, ring, spill, tmp_path):
    found = checkpoint(store, ring, spill, shared=os.urandom(20 << 20))
    expected = read_all(store, ring, found.checkpoint, tmp_path / "eager")
    away, stalls = threading.Event(), []

    class Flaky(Wrapped):
        def before(self, operation: str, name: str) -> None:
            if away.is_set():
                raise StoreUnreachable("away", "wait")

    def stalled(seconds: float, error: Exception) -> None:
        stalls.append(seconds)
        if len(stalls) > 3:
            away.clear()

    image = reader.fetch_lazy(Flaky(store), ring, found.checkpoint, tmp_path / "lazy", stalled)
    image.bring_rest(parallel=1)
    away.set()
    assert content(image) == expected
    deadline = time.monotonic() + 30
    while image.cache.missing and image.cache.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert image.cache.failure is None and not image.cache.missing
    image.close()
    assert len(stalls) > 3 or not image.cache.missing


def test_lazy_image_refuses_a_damaged_chunk(store, ring, spill, tmp_path):
    found = checkpoint(store, ring, spill)
    name = layout.pack_name(found.packs[0])
    data = bytearray(store.get(name))
    data[50] ^= 4
    store.put(name, data)
    with pytest.raises(ImageRefused):
        image = reader.fetch_lazy(store, ring, found.checkpoint, tmp_path, lambda *_: None)
        try:
            content(image)
        finally:
            image.close()


@pytest.mark.parametrize("size", [1 << 20, 60 << 20])
@pytest.mark.parametrize("harm", ["missing", "cut short"])
def test_lazy_fetch_detects_a_truncated_pack_first(store, ring, spill, tmp_path, size, harm):
    """Check packs one by one, or all with one listing where there are many."""
    found = checkpoint(store, ring, spill, shared=os.urandom(size))
    image = reader.fetch_lazy(store, ring, found.checkpoint, tmp_path / "whole", lambda *_: None)
    assert image.cache.missing or size < ranges.SPAN, "memory is not brought before somebody asks for it"
    image.close()
    for pack in (found.packs[0], found.packs[len(found.packs) // 2]):
        name = layout.pack_name(pack)
        data = store.get(name)
        store.delete([name])
        if harm == "cut short":
            store.put(name, data[: len(data) // 3])
        with pytest.raises(ImageRefused, match=harm):
            reader.fetch_lazy(store, ring, found.checkpoint, tmp_path / "lazy", lambda *_: None)
        store.put(name, data)


def test_closing_a_stalled_lazy_image_ends_its_readers(store, ring, spill, tmp_path: Path):
    found = checkpoint(store, ring, spill, shared=os.urandom(20 << 20))
    away = threading.Event()

    class Away(Wrapped):
        def before(self, operation: str, name: str) -> None:
            if away.is_set():
                raise StoreUnreachable("away", "wait")

    stalled = threading.Event()
    image = reader.fetch_lazy(Away(store), ring, found.checkpoint, tmp_path, lambda *_: stalled.set())
    away.set()
    image.bring_rest(parallel=1)
    assert stalled.wait(10)
    image.close()
    assert image.cache.missing
