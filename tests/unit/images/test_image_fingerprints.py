"""Test that recognising memory by 1 MiB blocks gives the same image as digesting each window."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import threading
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_helpers import SESSION, SMALL, add_run, read_all

from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.keys import KeyRing, new_key
from cmdop_migrate.images.format.layout import PAGE, WINDOW
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.format.seal import Sealer
from cmdop_migrate.images.format.windows import Extent, window_count
from cmdop_migrate.images.write import page_buffers as feeds
from cmdop_migrate.images.write.fingerprints import BLOCK, BlockFingerprints, pieces
from cmdop_migrate.images.write.freeze_spill import SpillFile
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.storage.base import Store
from cmdop_migrate.storage.memory import MemoryStore

START = 0x7000_0000 - 5 * PAGE
SIZE = 3 * BLOCK
_PWRITEV = os.pwritev


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of everything that is digested as a chunk."""
    sizes: list[int] = []
    real = Sealer.id_of

    def id_of(self: Sealer, data: bytes) -> bytes:
        sizes.append(len(data))
        return real(self, data)

    monkeypatch.setattr(Sealer, "id_of", id_of)
    return sizes


def save(
    store: Store, ring: KeyRing, folder: Path, data: bytes, parent: Manifest | None, later: bool, start: int = START
) -> Manifest:
    writer = ImageWriter(
        store,
        ring,
        SESSION,
        folder,
        parent.checkpoint if parent else None,
        replace(SMALL, defer=later, fingerprints=folder / "hints"),
    )
    writer.begin()
    add_run(writer, "process-1", start, len(data) // PAGE, 4, data)
    writer.end_input()
    return writer.commit(7)


def back(store: Store, ring: KeyRing, found: Manifest, folder: Path, start: int = START) -> bytes:
    return read_all(store, ring, found.checkpoint, folder / found.checkpoint)[f"process-1@{start:x}"]


@pytest.mark.parametrize("later", [False, True])
def test_unchanged_blocks_are_not_digested_and_changed_ones_are_sent(tmp_path, ring, digested, later):
    store, draw = MemoryStore(), random.Random(1)
    data = bytearray(draw.randbytes(SIZE))
    data[BLOCK + WINDOW : 2 * BLOCK] = bytes(BLOCK - WINDOW)
    first = save(store, ring, tmp_path, bytes(data), None, later)
    digested.clear()
    second = save(store, ring, tmp_path, bytes(data), first, later)
    assert sum(size for size in digested if size >= WINDOW) < BLOCK, "the ends of it, and tables"
    assert second.sizes["new_chunks"] <= 1  # its page table is no other
    assert {key: second.sizes[key] for key in ("memory", "zero")} == {
        key: first.sizes[key] for key in ("memory", "zero")
    }
    at = BLOCK // 2 + 3 * PAGE
    data[at : at + 10] = b"0123456789"
    third = save(store, ring, tmp_path, bytes(data), second, later)
    assert third.sizes["new_chunks"] <= 2
    for found in (second, third):
        assert found.sizes["reused"] + found.sizes["zero"] >= SIZE - WINDOW
    assert back(store, ring, third, tmp_path) == bytes(data)
    assert back(store, ring, second, tmp_path) != bytes(data)


def test_fingerprints_of_another_checkpoint_are_not_used(tmp_path, ring, digested):
    store = MemoryStore()
    data = random.Random(2).randbytes(SIZE)
    first = save(store, ring, tmp_path, data, None, later=False)
    hints = tmp_path / "hints"
    of_first = hints.read_bytes()
    second = save(store, ring, tmp_path, data, first, later=False)
    of_second = hints.read_bytes()
    wrong = bytearray(of_second)
    wrong[len(wrong) // 2] ^= 1
    for bad in (of_first, bytes(wrong), of_second[:-1], of_second[:10], b"", None):
        hints.unlink(missing_ok=True)
        if bad is not None:
            hints.write_bytes(bad)
        digested.clear()
        again = save(store, ring, tmp_path, data, second, later=False)
        assert sum(digested) >= SIZE, "window by window"
        assert again.sizes["new_chunks"] <= 1
    hints.write_bytes(of_second)
    digested.clear()
    save(store, ring, tmp_path, data, second, later=False)
    assert sum(digested) < SIZE // 2


def test_fingerprints_of_another_key_are_not_used(tmp_path, ring):
    store = MemoryStore()
    data = random.Random(3).randbytes(SIZE)
    first = save(store, ring, tmp_path, data, None, later=False)
    other = KeyRing((new_key(), *ring.keys))
    second = save(store, other, tmp_path, data, first, later=False)
    assert second.key != first.key and second.sizes["new"] > SIZE
    assert back(store, other, second, tmp_path) == data


@pytest.mark.parametrize("later", [False, True])
def test_unchanged_block_missing_from_the_store_is_sent_again(tmp_path, ring, later):
    store, empty = MemoryStore(), MemoryStore()
    data = random.Random(4).randbytes(SIZE)
    first = save(store, ring, tmp_path, data, None, later)
    again = save(empty, ring, tmp_path, data, first, later)
    assert again.sizes["new"] > SIZE
    assert back(empty, ring, again, tmp_path) == data


def test_fingerprint_depends_on_the_window_cut(tmp_path, ring):
    store = MemoryStore()
    data = random.Random(5).randbytes(SIZE)
    first = save(store, ring, tmp_path, data, None, later=False, start=START)
    moved = save(store, ring, tmp_path, data, first, later=False, start=START + PAGE)
    assert back(store, ring, moved, tmp_path, START + PAGE) == data
    shifted = save(store, ring, tmp_path, data, moved, later=False, start=START + PAGE + 16 * BLOCK)
    assert shifted.sizes["new_chunks"] <= 1, "the same cut, at another address"
    assert back(store, ring, shifted, tmp_path, START + PAGE + 16 * BLOCK) == data


def test_number_of_fingerprints_is_bounded(tmp_path, ring):
    sealer = Sealer(ring.current)
    some = BlockFingerprints(sealer, most=2)
    for number in range(5):
        some.keep(some.key(bytes([number]) * WINDOW, 0), [bytes([number]) * layout.ID_BYTES])
    some.save(tmp_path / "hints", "abcd")
    found = BlockFingerprints(sealer)
    assert not found
    found.load(tmp_path / "hints", "abcd")
    assert (
        found
        and [found.find(found.key(bytes([n]) * WINDOW, 0)) is not None for n in range(5)] == [True, True] + [False] * 3
    )


def test_unwritable_fingerprint_file_does_not_fail_the_checkpoint(tmp_path, ring):
    store = MemoryStore()
    (tmp_path / "hints").mkdir()
    found = save(store, ring, tmp_path, random.Random(6).randbytes(SIZE), None, later=False)
    assert found.sizes["memory"] == SIZE


def writer_of(store: Store, ring: KeyRing, folder: Path, parent: Manifest) -> ImageWriter:
    options = replace(SMALL, defer=True, fingerprints=folder / "hints")
    return ImageWriter(store, ring, SESSION, folder, parent.checkpoint, options)


@pytest.fixture
def few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use few buffers, so that not all input rests in memory until the end."""
    monkeypatch.setattr(feeds.PageBuffers.__init__, "__defaults__", (3, BLOCK, None, False))


@pytest.mark.usefixtures("few_buffers")
def test_aborted_upload_keeps_the_fingerprints_usable(tmp_path, ring, digested):
    store, data = MemoryStore(), random.Random(8).randbytes(8 * BLOCK)
    first = save(store, ring, tmp_path, data, None, later=True)
    before = threading.active_count()
    writer = writer_of(store, ring, tmp_path, first)
    writer.begin()
    add_run(writer, "process-1", START, len(data) // PAGE, 4, bytes(reversed(data)))
    writer.abort()
    assert threading.active_count() == before
    digested.clear()
    again = save(store, ring, tmp_path, data, first, later=True)
    assert sum(digested) < 2 * BLOCK and back(store, ring, again, tmp_path) == data
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["hints"], "nothing stays on disk"


@pytest.mark.usefixtures("few_buffers")
def test_full_disk_with_fingerprints_still_writes_the_image(tmp_path, ring, monkeypatch):
    def pwritev(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    store, data = MemoryStore(), bytearray(random.Random(9).randbytes(8 * BLOCK))
    first = save(store, ring, tmp_path, bytes(data), None, later=True)
    data[3 * BLOCK : 6 * BLOCK] = random.Random(10).randbytes(3 * BLOCK)
    monkeypatch.setattr(os, "pwritev", pwritev)
    second = save(store, ring, tmp_path, bytes(data), first, later=True)
    assert back_without_disk(store, ring, second) == bytes(data)


def back_without_disk(store: Store, ring: KeyRing, found: Manifest) -> bytes:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as made:
        patch.setattr(os, "pwritev", _PWRITEV)
        return back(store, ring, found, Path(made))


def test_pieces_cover_every_window_exactly_once():
    for vaddr, size in ((0, BLOCK), (START, SIZE), (BLOCK - PAGE, 2 * PAGE), (5 * PAGE, PAGE), (WINDOW, 2 * BLOCK)):
        refs = array("I", bytes(4 * window_count(vaddr, size)))
        found = list(pieces([Extent("process-1", vaddr, size, 4, True, 7 * PAGE, refs)]))
        assert [one.vaddr - vaddr for one in found] == [one.at - 7 * PAGE for one in found]
        assert sum(one.size for one in found) == size and all(one.size <= BLOCK for one in found)
        slots = [slot for one in found for slot in range(one.slot, one.slot + window_count(one.vaddr, one.size))]
        assert slots == list(range(len(refs)))


def test_spill_refuses_a_buffer_after_start_deferred(tmp_path):
    taken: list[bytes] = []
    aside = SpillFile(tmp_path, lambda buffer, batch, release: taken.append(bytes(buffer)), lambda _: None)
    batch = [Extent("process-1", 0, PAGE, 4, True, 0, array("I"))]
    assert aside.put(bytearray(b"a" * PAGE), batch)
    aside.start_deferred(lambda: bytearray(PAGE))
    assert not aside.put(bytearray(b"b" * PAGE), batch)
    aside.finish()
    aside.stop()
    assert not aside.put(bytearray(b"c" * PAGE), batch)
    assert taken == [b"a" * PAGE] and threading.active_count() < 50


regions = st.tuples(st.integers(0, SIZE // PAGE - 1), st.integers(1, 40), st.sampled_from(["zero", "new", "same"]))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.lists(regions, max_size=4), st.booleans(), st.integers(0, 2)), min_size=2, max_size=5))
def test_image_with_fingerprints_round_trips_any_changes(steps):
    """Change regions in each step, sometimes grow or move the whole, with and without spilling."""
    store, ring, draw = MemoryStore(), KeyRing((new_key(),)), random.Random(7)
    data, start, parent = bytearray(draw.randbytes(SIZE)), START, None
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for changes, later, moved in steps:
            for page, count, kind in changes:
                at, size = page * PAGE, min(count * PAGE, SIZE - page * PAGE)
                if kind != "same":
                    data[at : at + size] = bytes(size) if kind == "zero" else draw.randbytes(size)
            start += moved * PAGE
            parent = save(store, ring, folder, bytes(data), parent, later, start)
            assert back(store, ring, parent, folder, start) == bytes(data)
