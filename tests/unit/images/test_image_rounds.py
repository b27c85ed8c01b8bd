"""A dump of what was written since the last one gives the same image as a dump of everything."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_helpers import SESSION, SMALL, read_all

from cmdop_migrate.criu import page_server
from cmdop_migrate.criu.injected_code import Code
from cmdop_migrate.criu.page_server import ADD_F, CLOSE, LAZY, OPEN2, PARENT, PRESENT, Target
from cmdop_migrate.images.format import keys
from cmdop_migrate.images.format.chunk_table import ChunkTable
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.layout import PAGE, WINDOW
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.write.previous_round import PreviousRound
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.snapshot.capture.incremental import FrozenMemory, PreCopyRounds
from cmdop_migrate.snapshot.session_memory import MemorySink
from cmdop_migrate.storage.base import Store
from cmdop_migrate.storage.memory import MemoryStore

VERSION = (4, 2)
START = 0x7000_0000 - 3 * PAGE
PAGES = 100
FLAGS = PRESENT | LAZY


class Still(FrozenMemory):
    """A process of which only some memory is asked for."""

    def __init__(self, memory: bytes) -> None:
        super().__init__([])
        self.memory, self.asked = memory, set[int]()

    def read(self, target: Target, vaddr: int, into: memoryview) -> None:
        assert target == Target("process", 7)
        self.asked |= {(vaddr - START) // PAGE + at for at in range(len(into) // PAGE)}
        into[:] = self.memory[vaddr - START : vaddr - START + len(into)]


def criu(sock: socket.socket, memory: bytes, clean: set[int]) -> None:
    """Says what CRIU would: pages that are not clean with their bytes, runs of clean ones without, if it may."""

    def say(command: int, flags: int, count: int, vaddr: int, more: bytes = b"") -> None:
        sock.sendall(struct.pack("<IxxxxQQQ", command | flags << 16, count, vaddr, 7 << 8 | 1) + more)

    say(OPEN2, 0, 0, 0)
    known = sock.recv(1) == b"\1"
    at = 0
    while at < PAGES:
        is_clean = known and at in clean
        end = at + 1
        while end < PAGES and (known and end in clean) == is_clean:
            end += 1
        data = b"" if is_clean else memory[at * PAGE : end * PAGE]
        say(ADD_F, PARENT if is_clean else FLAGS, end - at, START + at * PAGE, data)
        at = end
    say(CLOSE, 0, 0, 0)
    sock.recv(4)


def dump(
    store: Store,
    ring: KeyRing,
    spill: Path,
    memory: bytes,
    clean: set[int],
    before: tuple[str, PreviousRound] | None,
    injected: Mapping[int, Code] | None = None,
) -> tuple[Manifest, PreviousRound, Still]:
    writer = ImageWriter(store, ring, SESSION, spill, before[0] if before else None, SMALL)
    writer.begin()
    ours, theirs = socket.socketpair()
    still = Still(memory)
    other = threading.Thread(target=criu, args=(theirs, memory, clean))
    other.start()
    page_server.receive(ours, MemorySink(writer, before[1] if before else None, still, injected), VERSION)
    other.join()
    theirs.close()
    return writer.commit(7), writer.previous_round, still


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, PAGES - 1)), st.sets(st.integers(0, PAGES - 1)), st.sets(st.integers(0, PAGES // 16)))
def test_the_image_is_that_of_a_whole_dump(dirty, dirtier, zeros):
    store, ring = MemoryStore(), KeyRing((keys.new_key(),))
    memory = bytearray(os.urandom(PAGES * PAGE))
    for number in zeros:
        memory[number * WINDOW : (number + 1) * WINDOW] = bytes(len(memory[number * WINDOW : (number + 1) * WINDOW]))
    with tempfile.TemporaryDirectory() as folder:
        found, earlier, still = dump(store, ring, Path(folder), bytes(memory), set(), None)
        assert not still.asked
        for written in (dirty, dirtier):
            for page in written:
                memory[page * PAGE : (page + 1) * PAGE] = os.urandom(PAGE)
            clean = set(range(PAGES)) - written
            found, earlier, still = dump(store, ring, Path(folder), bytes(memory), clean, (found.checkpoint, earlier))
            got = read_all(store, ring, found.checkpoint, Path(folder) / "local")
            assert got[f"process-7@{START:x}"] == bytes(memory)
            first = {page for page in range(PAGES) if (START + page * PAGE) // WINDOW == START // WINDOW}
            windows = {(START + page * PAGE) // WINDOW for page in written}
            near = {page for page in range(PAGES) if (START + page * PAGE) // WINDOW in windows}
            last = {
                page for page in range(PAGES) if (START + page * PAGE) // WINDOW == (START + PAGES * PAGE) // WINDOW
            }
            assert still.asked <= (near | first | last) - written, "only the rest of a window is read all the same"


def test_a_chunk_the_store_lost_is_read_from_the_session(tmp_path):
    ring = KeyRing((keys.new_key(),))
    memory = os.urandom(PAGES * PAGE)
    _, earlier, _ = dump(MemoryStore(), ring, tmp_path, memory, set(), None)
    other = MemoryStore()  # as if all had been pruned
    found, _, still = dump(other, ring, tmp_path, memory, set(range(PAGES)), ("ab" * 16, earlier))
    assert still.asked == set(range(PAGES))
    assert read_all(other, ring, found.checkpoint, tmp_path / "local")[f"process-7@{START:x}"] == memory


def test_another_process_is_not_taken_for_the_earlier_one(tmp_path):
    store, ring = MemoryStore(), KeyRing((keys.new_key(),))
    writer = ImageWriter(store, ring, SESSION, tmp_path, None, SMALL)
    writer.begin()
    sink = MemorySink(writer, PreviousRound({}, writer._running.table), Still(b""))
    assert not sink.open(Target("process", 7)) and not sink.open(Target("shmem", 7))
    writer.abort()


def test_pages_left_out_though_nothing_earlier_is_known_fail_the_dump(tmp_path):
    writer = ImageWriter(MemoryStore(), KeyRing((keys.new_key(),)), SESSION, tmp_path, None, SMALL)
    writer.begin()
    sink = MemorySink(writer)
    sink.open(Target("process", 7))
    with pytest.raises(page_server.ProtocolError, match="left out"):
        sink.run(START, 1, PARENT)
    writer.abort()


def test_memory_of_a_living_process():
    held = bytearray(os.urandom(3 * PAGE))
    place = ctypes.addressof((ctypes.c_char * len(held)).from_buffer(held))
    still, got = FrozenMemory([os.getpid()]), bytearray(2 * PAGE)
    inner = next(iter(still._files))
    still.read(Target("process", inner), place + PAGE, memoryview(got))
    assert got == held[PAGE:]
    with pytest.raises(OSError):
        still.read(Target("process", inner), 0, memoryview(got))
    with pytest.raises(OSError, match="gone"):
        still.read(Target("process", 1 << 30), place, memoryview(got))
    still.close()


def test_what_criu_left_of_a_round_is_kept_for_the_next_and_no_longer(tmp_path):
    rounds = PreCopyRounds(tmp_path)
    assert rounds.parent is None
    for number in range(2):
        (tmp_path / "images").mkdir()
        (tmp_path / "images/inventory.img").write_text(str(number))
        (tmp_path / "images/parent").symlink_to("../images.before")
        rounds.keep(tmp_path / "images", PreviousRound({}, ChunkTable()))
        assert rounds.parent == "../images.before"
        assert os.listdir(tmp_path) == ["images.before"]
        assert os.listdir(tmp_path / "images.before") == ["inventory.img"]
    rounds.close()
    assert os.listdir(tmp_path) == [] and rounds.parent is None


@pytest.mark.parametrize("page", [0, 1, PAGES // 2, PAGES - 1])
@pytest.mark.parametrize("clean", [set(), set(range(PAGES))])
def test_page_that_criu_writes_to_is_stored_as_it_was_before(page, clean, tmp_path):
    store, ring = MemoryStore(), KeyRing((keys.new_key(),))
    true = os.urandom(PAGES * PAGE)
    at = page * PAGE
    seen = true[:at] + b"\x0f\x05" + b"\xcc" * 6 + true[at + 8 :]  # what is there while CRIU runs a system call
    injected = {7: Code(START + at, true[at : at + PAGE]), 8: Code(START, bytes(PAGE))}
    before = None
    if clean:  # left out by CRIU, and read from the process because the store has lost it
        before = "ab" * 16, dump(MemoryStore(), ring, tmp_path, true, set(), None)[1]
    found, _, _ = dump(store, ring, tmp_path, seen, clean, before, injected)
    assert read_all(store, ring, found.checkpoint, tmp_path / "local")[f"process-7@{START:x}"] == true
