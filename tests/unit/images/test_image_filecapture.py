"""Test that an image has every chunk that its file table names, even if the local caches are wrong."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cmdop_migrate.images.files import file_table, stat_cache, unpack
from cmdop_migrate.images.files.content import on_tmpfs
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.read import reader
from cmdop_migrate.images.store import index_cache
from cmdop_migrate.images.store.index_cache import IndexCache
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.session.files_in_use import Touched
from cmdop_migrate.snapshot.capture import changed_files
from cmdop_migrate.storage.base import Store
from tests.support.file_tree import snapshot
from tests.unit.images.image_helpers import SESSION, SMALL

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def begun(store: Store, ring: KeyRing, place: Path) -> ImageWriter:
    writer = ImageWriter(store, ring, SESSION, place / "spill", None, replace(SMALL, index_caches=place / "ledgers"))
    writer.begin()
    return writer


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    made = tmp_path / "upper"
    (made / "small").mkdir(parents=True)
    for number in range(5):
        (made / "small" / f"f{number}").write_bytes(b"%d " % number * 100)
    (made / "large").write_bytes(os.urandom((2 << 20) + 5))
    time.sleep(2 * stat_cache.TICK_NS / 1e9)
    return made


def files_of(store: Store, ring: KeyRing, checkpoint: str, place: Path) -> dict[bytes, tuple[object, ...]]:
    image = reader.fetch(store, ring, checkpoint, place / "image")
    try:
        (place / "again").mkdir()
        unpack.restore(file_table.parse(image.blob("files/0")), image, place / "again")
    finally:
        image.close()
    return snapshot(place / "again")


@pytest.mark.parametrize("how", ["forgotten", "broken"])
def test_file_chunks_missing_from_the_store_are_sent_again(store, ring, tmp_path, upper, monkeypatch, how):
    """Leave chunks of an interrupted upload in the store, and a table that names them on this host. Between the check
    that they exist and their use, another checkpoint of this host forgets them, because their packs are about to be
    pruned; or the disk fails under the index cache."""
    if on_tmpfs(upper):
        pytest.skip("stats are never trusted on tmpfs")
    first = begun(store, ring, tmp_path)
    changed_files.add(first, changed_files.capture(first, tmp_path, [upper], Touched()))
    first.finish_input()
    first.commit(1)
    second = begun(store, ring, tmp_path)
    capture = changed_files.files_capture.capture

    def captured(*given, **named):
        done = capture(*given, **named)
        if how == "forgotten":
            other = IndexCache(ring.current, index_cache.path_of(tmp_path / "ledgers", store.url, ring.current))
            other.forget(lambda name: True)
            other.close()
        else:
            second._cache._db.close()
        return done

    monkeypatch.setattr(changed_files.files_capture, "capture", captured)
    changed_files.add(second, changed_files.capture(second, tmp_path, [upper], Touched()))
    monkeypatch.undo()
    second.finish_input()
    made = second.commit(2)
    assert files_of(store, ring, made.checkpoint, tmp_path) == snapshot(upper)


def test_file_capture_works_without_room_for_its_caches(store, ring, tmp_path, upper):
    (tmp_path / "files-0.stats").symlink_to("/dev/full")
    for _ in range(2):
        writer = begun(store, ring, tmp_path)
        changed_files.add(writer, changed_files.capture(writer, tmp_path, [upper], Touched()))
        writer.finish_input()
        made = writer.commit(1)
        (tmp_path / "files-0.table").unlink()  # reading from such a device would never end
    assert files_of(store, ring, made.checkpoint, tmp_path) == snapshot(upper)
