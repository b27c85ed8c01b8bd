"""Test the spill file: it gives back what was written, shows no plaintext, and a full disk only costs time."""

from __future__ import annotations

import errno
import os
import threading
from array import array

import pytest
from image_helpers import SESSION, add_run, memory, read_all

from cmdop_migrate.errors import Blocked
from cmdop_migrate.images.format.layout import PAGE
from cmdop_migrate.images.format.windows import Extent
from cmdop_migrate.images.write import page_buffers as feeds
from cmdop_migrate.images.write.freeze_spill import SpillFile
from cmdop_migrate.images.write.writer import ImageWriter, WriterOptions


def batch(size: int) -> list[Extent]:
    return [Extent("process-1", 0, size, 4, True, 0, array("I"))]


class Taken:
    """Record submitted buffers and released ones."""

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.back: list[bytearray] = []

    def submit_extents(self, buffer: bytearray, extents, release) -> None:
        self.data.append(bytes(buffer[: extents[-1].offset + extents[-1].size]))
        release(buffer)

    def check(self) -> None:
        """Do nothing: it can always store."""

    def wait(self, count: int) -> None:
        for _ in range(1000):
            if len(self.back) >= count:
                return
            threading.Event().wait(0.01)
        raise AssertionError(f"{len(self.back)} of {count} buffers came back")


def test_spilled_buffers_are_submitted_only_after_start_deferred(tmp_path):
    taken = Taken()
    aside = SpillFile(tmp_path, taken.submit_extents, taken.back.append)
    given = [os.urandom(size * PAGE) for size in (16, 1, 16, 7)]
    given[2:2] = [bytes(5 * PAGE)]
    given += [bytes(PAGE)]
    for one in given:
        aside.put(bytearray(one) + b"what was in it before", batch(len(one)))
    taken.wait(6)
    assert taken.data == [] and os.listdir(tmp_path) == []
    assert os.fstat(aside._file.fileno()).st_size < 40 * PAGE + 4 * 32, "zeros take no room"
    aside.start_deferred(lambda: bytearray(b"x" * 16 * PAGE))
    aside.finish()
    assert taken.data == given[::-1]
    assert os.fstat(aside._file.fileno()).st_size == 0, "its room is given back as it is read"
    aside.stop()


def test_spill_file_shows_no_plaintext(tmp_path):
    taken = Taken()
    aside = SpillFile(tmp_path, taken.submit_extents, taken.back.append)
    aside.put(bytearray(b"a secret here" + bytes(PAGE - 13)), batch(PAGE))
    taken.wait(1)
    on_disk = os.pread(aside._file.fileno(), 2 * PAGE, 0)
    assert len(on_disk) > PAGE and b"secret" not in on_disk and bytes(64) not in on_disk
    aside.stop()


def test_changed_spill_file_is_refused(tmp_path):
    taken = Taken()
    aside = SpillFile(tmp_path, taken.submit_extents, taken.back.append)
    aside.put(bytearray(os.urandom(PAGE)), batch(PAGE))
    taken.wait(1)
    byte = os.pread(aside._file.fileno(), 1, 100)
    os.pwrite(aside._file.fileno(), bytes([byte[0] ^ 1]), 100)
    aside.start_deferred(lambda: bytearray(PAGE))
    with pytest.raises(Blocked, match="failed authentication"):
        aside.finish()
    assert taken.data == []
    aside.stop()


def test_full_disk_makes_spilling_fall_back_to_working_now(tmp_path, monkeypatch):
    room = 2

    def pwritev(fd: int, data: list[memoryview], at: int, flags: int) -> int:
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, at, flags)

    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", pwritev)
    taken = Taken()
    aside = SpillFile(tmp_path, taken.submit_extents, taken.back.append)
    given = [os.urandom(PAGE) for _ in range(5)]
    for one in given:
        aside.put(bytearray(one), batch(PAGE))
    taken.wait(5)
    assert taken.data == given[2:]  # at once, there being no other way
    aside.start_deferred(lambda: bytearray(PAGE))
    aside.finish()
    assert taken.data == given[2:] + given[1::-1]
    aside.stop()


def test_stopped_spill_file_leaves_nothing(tmp_path):
    before = threading.active_count()
    taken = Taken()
    aside = SpillFile(tmp_path, taken.submit_extents, taken.back.append)
    aside.put(bytearray(PAGE), batch(PAGE))
    aside.stop()
    assert threading.active_count() == before and taken.data == [] and os.listdir(tmp_path) == []


@pytest.mark.parametrize("later", [False, True])
def test_image_is_the_same_with_and_without_deferring(store, ring, spill, tmp_path, monkeypatch, later):
    monkeypatch.setattr(feeds.PageBuffers.__init__, "__defaults__", (3, 80 * PAGE, None, False))
    writer = ImageWriter(store, ring, SESSION, spill, options=WriterOptions(defer=later))
    writer.begin()
    data = memory(5, 1000)
    add_run(writer, "process-1", 0x10000, 1000, 4, data)
    writer.end_input()
    found = writer.commit(7)
    assert read_all(store, ring, found.checkpoint, tmp_path / "local")["process-1@10000"] == data


def test_abort_while_memory_is_spilled_ends(store, ring, spill):
    before = threading.active_count()
    writer = ImageWriter(store, ring, SESSION, spill, options=WriterOptions(defer=True))
    writer.begin()
    add_run(writer, "process-1", 0x10000, 1000, 4, memory(5, 1000))
    writer.abort()
    assert threading.active_count() == before


def test_spill_error_fails_the_dump_instead_of_hanging_it(tmp_path, monkeypatch):
    def pwritev(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(os, "pwritev", pwritev)
    feed = feeds.PageBuffers(Taken(), buffers=2, size=32 * PAGE, spill_dir=tmp_path)
    feed.open("process-1")
    feed.run(0x10000, 1000, 4, True)
    at = 0x10000
    with pytest.raises(MemoryError):
        while at < 0x10000 + 1000 * PAGE:
            view = feed.window(at, 1000 * PAGE)
            view[:1] = b"x"
            at += len(view)
    feed.stop()
