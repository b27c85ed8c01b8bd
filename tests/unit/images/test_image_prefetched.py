"""Test that prefetched packs save requests to the store, and are trusted no more than it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from image_helpers import SESSION, SMALL, Wrapped, add_run, checkpoint, memory, read_all

from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.format import layout
from cmdop_migrate.images.read import prefetched
from cmdop_migrate.images.read.prefetched import PackPrefetcher, PrefetchedStore
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.migration.prefetch import PackPrefetch, pack_line
from cmdop_migrate.storage.base import Store
from tests.support.patience import bound


class Counted(Wrapped):
    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.packs_read = 0

    def before(self, operation: str, name: str) -> None:
        self.packs_read += operation == "get" and layout.pack_of(name) is not None


def gathered(store: Store, folder: Path, sent: bytes, wanted: int) -> None:
    """Wait until `folder` has as many packs as `sent` names."""
    reader, writer = os.pipe()
    try:
        with PackPrefetch(store, folder, reader):
            os.write(writer, sent)
            os.close(writer)
            until = time.monotonic() + bound(10)
            while len(os.listdir(folder)) < wanted and time.monotonic() < until:
                time.sleep(0.01)
    finally:
        os.close(reader)


def test_on_pack_is_called_once_per_stored_pack(store, ring, spill):
    named: list[str] = []

    def on_pack(pack: str) -> None:
        assert store.stat(layout.pack_name(pack)) is not None
        named.append(pack)

    writer = ImageWriter(store, ring, SESSION, spill, options=SMALL, on_pack=on_pack)
    writer.begin()
    add_run(writer, "process-1", 0x10000, 40, 4, memory(1))
    found = writer.commit(7)
    assert sorted(named) == sorted(found.packs)


def test_prefetched_pack_is_not_read_from_the_store(store, ring, spill, tmp_path):
    found = checkpoint(store, ring, spill, seed=3)
    counted = Counted(store)
    gathered(counted, tmp_path / "packs", b"".join(map(pack_line, found.packs)), len(found.packs))
    assert counted.packs_read == len(found.packs)
    got = read_all(PrefetchedStore(counted, tmp_path / "packs"), ring, found.checkpoint, tmp_path / "local")
    assert got["process-1@7f0000003000"] == memory(3)
    assert counted.packs_read == len(found.packs)


def test_pack_that_was_not_prefetched_is_read_from_the_store(store, ring, spill, tmp_path):
    found = checkpoint(store, ring, spill, seed=3)
    got = read_all(PrefetchedStore(store, tmp_path / "nothing"), ring, found.checkpoint, tmp_path / "local")
    assert got["process-1@7f0000003000"] == memory(3)


def test_changed_prefetched_pack_is_refused(store, ring, spill, tmp_path):
    found = checkpoint(store, ring, spill, seed=3)
    for pack in found.packs:
        assert PackPrefetcher(store, tmp_path / "packs").bring(pack)
        damaged = bytearray((tmp_path / "packs" / pack).read_bytes())
        damaged[100] ^= 1
        (tmp_path / "packs" / pack).write_bytes(damaged)
    with pytest.raises(ImageRefused):
        read_all(PrefetchedStore(store, tmp_path / "packs"), ring, found.checkpoint, tmp_path / "local")


def test_words_that_name_no_pack_do_no_harm(store, ring, spill, tmp_path):
    found = checkpoint(store, ring, spill)
    noise = b'no json\n[]\n{"pack": 7}\n{"pack": "../../etc"}\n{"pack": "%s"}\n\xff\n' % (b"ab" * 16)
    gathered(store, tmp_path / "packs", noise + b"".join(map(pack_line, found.packs)), len(found.packs))
    assert sorted(os.listdir(tmp_path / "packs")) == sorted(found.packs)


def test_prefetch_leaves_free_disk_space(store, ring, spill, tmp_path, monkeypatch):
    found = checkpoint(store, ring, spill)
    monkeypatch.setattr(prefetched, "RESERVE", 1 << 60)
    assert not PackPrefetcher(store, tmp_path / "packs").bring(found.packs[0])
    assert os.listdir(tmp_path / "packs") == []


def test_prefetch_ends_without_an_end_of_input(store, tmp_path):
    before = threading.active_count()
    reader, writer = os.pipe()
    with PackPrefetch(store, tmp_path / "packs", reader):
        pass
    assert threading.active_count() == before  # its caller forks
    os.close(reader)
    os.close(writer)


def test_what_is_on_its_way_is_waited_for_aloud(store, ring, spill, tmp_path):
    """Use a slow store: a caller that takes silence for an answer must get output until the last pack arrived."""
    found = checkpoint(store, ring, spill)
    going = threading.Event()

    class Slow(Wrapped):
        def before(self, operation: str, name: str) -> None:
            going.set()
            time.sleep(0.7)

    heard: list[float] = []
    reader, writer = os.pipe()
    with PackPrefetch(Slow(store), tmp_path / "packs", reader, lambda: heard.append(time.monotonic())):
        os.write(writer, pack_line(found.packs[0]))
        assert going.wait(5)
    assert heard and os.listdir(tmp_path / "packs") == [found.packs[0]]
    os.close(reader)
    os.close(writer)
