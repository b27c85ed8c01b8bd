"""Processes that digest, compress and seal: the image is the same with and without them, whatever becomes of them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cmdop_migrate.errors import StoreUnreachable
from cmdop_migrate.images import sealing
from cmdop_migrate.images.keys import KeyRing
from cmdop_migrate.images.layout import PAGE, WINDOW
from cmdop_migrate.images.seal import Sealer
from cmdop_migrate.images.sealing import SealingProcess
from cmdop_migrate.images.tables import load_table
from cmdop_migrate.images.writer import ImageWriter
from cmdop_migrate.storage.memory import MemoryStore
from tests.unit.images.image_helpers import SESSION, SMALL, content, memory, read_all

START = 0x7F0000003000
TWO = replace(SMALL, workers=2, processes=2)


def some_memory() -> bytes:
    """Random, text, zeros, and a stretch that is there twice."""
    twice = memory(5, 64)
    return memory(1, 700) + bytes(3 * WINDOW) + twice + memory(2, 500) + twice + random.Random(3).randbytes(1 << 20)


def write(writer: ImageWriter, data: bytes, pause: int = 0) -> Iterator[int]:
    """Runs of several sizes; after each, if it is asked for, the one who kills has his turn."""
    at, draw = 0, random.Random(7)
    while at < len(data):
        size = min(len(data) - at, draw.choice((1, 3, 16, 100, 256)) * PAGE)
        writer.add_run("process-1", START + at, size // PAGE, 1 + 4 * draw.randrange(2), data[at : at + size])
        at += size
        yield at


def processes(writer: ImageWriter) -> list[SealingProcess]:
    return list(writer._running._processes)


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("tuning", [SMALL, TWO])
def test_what_goes_in_comes_out(store: MemoryStore, ring: KeyRing, spill: Path, tmp_path: Path, tuning: object) -> None:
    assert isinstance(tuning, type(SMALL))
    data = some_memory()
    writer = ImageWriter(store, ring, SESSION, spill, tuning=tuning)
    writer.begin()
    pids = [one.process.pid for one in processes(writer)]
    assert len(pids) == tuning.processes and all(map(is_alive, pids))
    for _ in write(writer, data):
        pass
    writer.add_blob("criu/x.img", b"x" * 1000)
    writer.finish_input()
    seen = [one.process.is_there for one in processes(writer)]
    done = writer.commit(1)
    writer.abort()  # as flows do when what follows fails: nothing is left to end
    assert seen == [True] * tuning.processes, "they did the work"
    assert not any(map(is_alive, pids)), "no process stays"
    found = read_all(store, ring, done.checkpoint, tmp_path / "local")
    parts = {name: part for name, part in found.items() if name.startswith("process-1@")}
    whole = b"".join(parts[name] for name in sorted(parts, key=lambda one: int(one.partition("@")[2], 16)))
    assert whole == data and found["criu/x.img"] == b"x" * 1000


def test_the_same_chunks_with_and_without(ring: KeyRing, spill: Path) -> None:
    """Ids, sizes and what is shared do not depend on who does the work."""
    found = []
    for tuning in (SMALL, replace(SMALL, processes=1)):  # one worker: two number chunks as they come
        store = MemoryStore()
        writer = ImageWriter(store, ring, SESSION, spill, tuning=tuning)
        writer.begin()
        for _ in write(writer, some_memory()):
            pass
        done = writer.commit(1)
        table = load_table(store, done, Sealer(ring.current))
        counted = {key: done.sizes[key] for key in ("memory", "zero", "reused", "chunks", "new_chunks")}
        found.append((sorted((ident, size) for ident, *_, size in table.rows()), counted))
    assert found[0] == found[1]


@pytest.mark.parametrize("when", [0, 3, 20])
def test_killed_at_any_moment_the_image_is_whole(
    store: MemoryStore, ring: KeyRing, spill: Path, tmp_path: Path, when: int
) -> None:
    data = some_memory()
    writer = ImageWriter(store, ring, SESSION, spill, tuning=TWO)
    writer.begin()
    for number, _ in enumerate(write(writer, data)):
        if number == when:
            for one in processes(writer):
                os.kill(one.process.pid, signal.SIGKILL)
    done = writer.commit(1)
    found = read_all(store, ring, done.checkpoint, tmp_path / "local")
    parts = {name: part for name, part in found.items() if name.startswith("process-1@")}
    assert b"".join(parts[name] for name in sorted(parts, key=lambda one: int(one.partition("@")[2], 16))) == data


def test_given_up_none_stays(ring: KeyRing, spill: Path) -> None:
    class Broken(MemoryStore):
        def put(self, name: str, data: bytes | bytearray | memoryview) -> None:
            if name.startswith("packs/"):
                raise StoreUnreachable("away", "Wait.")
            super().put(name, data)

    writer = ImageWriter(Broken(), ring, SESSION, spill, tuning=TWO)
    writer.begin()
    pids = [one.process.pid for one in processes(writer)]
    with pytest.raises(StoreUnreachable):
        for _ in write(writer, some_memory()):
            pass
        writer.commit(1)
    writer.abort()
    assert pids and not any(map(is_alive, pids))


def test_more_than_it_has_room_for_is_not_taken(ring: KeyRing) -> None:
    one = SealingProcess(Sealer(ring.current))
    try:
        page = memoryview(bytes(PAGE))
        assert one.digest([page] * (sealing.MOST + 1)) is None
        assert one.digest([memoryview(bytes(sealing.ROOM)), page]) is None
        assert one.process.is_there
        ids = one.digest([page, memoryview(b"x" * PAGE)])
        assert ids == [Sealer(ring.current).id_of(bytes(PAGE)), Sealer(ring.current).id_of(b"x" * PAGE)]
    finally:
        one.process.close()
    assert one.digest([page]) is None and one.seal([0]) is None


def test_all_of_it_is_read_back(store: MemoryStore, ring: KeyRing, spill: Path, tmp_path: Path) -> None:
    """The helpers' own view of an image, over memory that does not shrink: the largest that a process seals at once."""
    data = random.Random(9).randbytes(4 << 20)
    writer = ImageWriter(store, ring, SESSION, spill, tuning=TWO)
    writer.begin()
    writer.add_run("process-1", 0x10000000, len(data) // PAGE, 1, data)
    done = writer.commit(1)
    from cmdop_migrate.images import reader

    image = reader.fetch(store, ring, done.checkpoint, tmp_path / "local")
    try:
        assert content(image)["process-1@10000000"] == data
    finally:
        image.close()
