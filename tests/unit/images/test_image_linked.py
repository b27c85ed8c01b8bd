"""Test that packs of a store on the same disk are linked, not copied, and trusted no more for that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from image_helpers import checkpoint, content, read_all

from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.format.layout import PAGE, WINDOW
from cmdop_migrate.images.read import reader
from cmdop_migrate.storage.local import LocalStore
from cmdop_migrate.storage.memory import MemoryStore
from cmdop_migrate.util import bulk_io


@pytest.fixture
def disk(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def packs_of(store: LocalStore) -> list[Path]:
    return [store.root / one.name for one in store.list("packs/")]


def test_local_packs_are_hard_linked_instead_of_copied(disk, ring, spill, tmp_path):
    found = checkpoint(disk, ring, spill, shared=os.urandom(3 << 20))
    image = reader.fetch(disk, ring, found.checkpoint, tmp_path / "local")
    try:
        expected = content(image)
        assert (tmp_path / "local" / "chunks").stat().st_size == 0
        linked = [one for one in packs_of(disk) if one.stat().st_nlink == 2]
        assert len(linked) == len(list((tmp_path / "local").glob("pack-*"))) > 0
        for one in packs_of(disk):  # pruned meanwhile
            one.unlink()
        assert content(image) == expected
    finally:
        image.close()


def test_linked_pack_is_verified_on_fetch_and_on_read(disk, ring, spill, tmp_path):
    found = checkpoint(disk, ring, spill, shared=os.urandom(3 << 20))
    image = reader.fetch(disk, ring, found.checkpoint, tmp_path / "local")
    for one in packs_of(disk):
        flip(one)
    try:
        with pytest.raises(ImageRefused):
            content(image)
    finally:
        image.close()
    with pytest.raises(ImageRefused):
        reader.fetch(disk, ring, found.checkpoint, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == [], "a link would keep what is pruned"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(200, len(data), 30_000):
        data[at] ^= 1
    path.write_bytes(data)


def test_pack_is_copied_if_it_cannot_be_linked(disk, ring, spill, tmp_path, monkeypatch):
    found = checkpoint(disk, ring, spill)
    expected = read_all(disk, ring, found.checkpoint, tmp_path / "linked")

    def other_disk(*_args: object, **_more: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    assert read_all(disk, ring, found.checkpoint, tmp_path / "copied") == expected
    assert not list((tmp_path / "copied").glob("pack-*"))


def test_missing_object_is_not_linked(disk, tmp_path):
    assert not disk.link("packs/aa/none", tmp_path / "x")
    assert not MemoryStore().link("packs/aa/none", tmp_path / "x")


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_stretches_equal_the_pages(kind, disk, ring, spill, tmp_path):
    """Require stretches of all or no zeros, in order, with the bytes that `read` gives."""
    store = disk if kind == "disk" else MemoryStore()
    mixed = b"".join(os.urandom(WINDOW) if number % 5 < 3 else bytes(WINDOW) for number in range(40))
    found = checkpoint(store, ring, spill, shared=mixed + (b"some text of many lines\n" * 30_000)[: 120 * PAGE])
    image = reader.fetch(store, ring, found.checkpoint, tmp_path / "local")
    zeros = 0
    for dst in image.targets:
        pages = image.pages(dst)
        for segment in (one for one in pages.segments if one.present):
            at = segment.vaddr
            while at < segment.end:
                start, end = pages.stretch(at, 4 * WINDOW)
                assert start == at and end <= segment.end and end - start <= 4 * WINDOW
                out = bytearray(end - start)
                zeros += not pages.fill(start, memoryview(out))
                expected = b""
                while len(expected) < len(out):
                    expected += b"".join(pages.read(start + len(expected), (len(out) - len(expected)) // PAGE))
                assert out == expected
                at = end
    image.close()
    assert zeros > 3


@pytest.mark.parametrize("old", [False, True], ids=["past the cache", "an older kernel"])
def test_bulk_io_writes_and_reads_all_bytes(tmp_path, monkeypatch, old):
    if old:
        real = os.pwritev
        monkeypatch.setattr(os, "pwritev", lambda fd, data, at, flags=0: refuse(flags) or real(fd, data, at))
    data = os.urandom(3_000_001)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        bulk_io.write(fd, data, 17, cached=False)
        out = bytearray(len(data) + 5)
        assert bulk_io.read(fd, memoryview(out), 17) == len(data)
        assert out[: len(data)] == data
    finally:
        os.close(fd)


def refuse(flags: int) -> None:
    if flags:
        raise OSError(95, "Operation not supported")
