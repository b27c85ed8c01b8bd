"""Test that processes verify chunks on this disk, and that this process verifies what they did not."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.layout import PAGE
from cmdop_migrate.images.read import chunk_cache, reader
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.storage.local import LocalStore
from cmdop_migrate.util.worker_process import WorkerProcess
from tests.unit.images.image_helpers import SESSION, SMALL, add_run

START = 0x7F0000003000
DATA = random.Random(1).randbytes(3 << 20)


@pytest.fixture
def saved(ring: KeyRing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LocalStore, str]:
    monkeypatch.setattr(chunk_cache, "CHECK_IN_PROCESSES", 1)
    monkeypatch.setattr("cmdop_migrate.images.read.ranges.SPAN", 256 << 10)  # so that there is something to share
    store = LocalStore(tmp_path / "store")
    writer = ImageWriter(store, ring, SESSION, tmp_path / "spill", options=SMALL)
    writer.begin()
    add_run(writer, "process-1", START, len(DATA) // PAGE, 4, DATA)
    return store, writer.commit(1).checkpoint


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the processes that were started."""
    pids: list[int] = []

    class Noted(WorkerProcess):
        def __init__(self, work: Callable[[socket.socket], None], kept: Collection[int]) -> None:
            super().__init__(work, kept)
            pids.append(self.pid)

    monkeypatch.setattr(chunk_cache, "WorkerProcess", Noted)
    return pids


def fetched(saved: tuple[LocalStore, str], ring: KeyRing, where: Path) -> bytes:
    image = reader.fetch(*(saved[0], ring, saved[1]), where)
    try:
        assert not image.cache.missing
        pages, got = image.pages("process-1"), b""
        while len(got) < len(DATA):
            got += b"".join(pages.read(START + len(got), 64))
        return got
    finally:
        image.close()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the groups of spans that this process verified."""
    here, found, real = os.getpid(), list[int](), chunk_cache.ChunkCache._check

    def check(self: chunk_cache.ChunkCache, group: list[int], data: memoryview) -> None:
        if os.getpid() == here:
            found.extend(group)
        real(self, group, data)

    monkeypatch.setattr(chunk_cache.ChunkCache, "_check", check)
    return found


def test_linked_packs_are_verified_in_processes_that_all_exit(saved, ring, tmp_path, made, checked):
    assert fetched(saved, ring, tmp_path / "local") == DATA
    assert len(made) == min(chunk_cache.MOST_PROCESSES, os.cpu_count() or 1) and checked == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in made)


def test_damaged_byte_is_refused_by_verifying_processes(saved, ring, tmp_path, made):
    (pack,) = [path for path in (tmp_path / "store" / "packs").rglob("*") if path.is_file()]
    whole = pack.read_bytes()
    for at in range(7, 3 << 20, 400_000):
        pack.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ImageRefused, match="changed, swapped or damaged"):
            fetched(saved, ring, tmp_path / f"local-{at}")
        assert not list((tmp_path / f"local-{at}").glob("pack-*")), "nothing of it stays"
    pack.write_bytes(whole)
    assert fetched(saved, ring, tmp_path / "local") == DATA
    assert not any(os.path.exists(f"/proc/{pid}") for pid in made)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_share_of_a_killed_or_stopped_process_is_verified_here(saved, ring, tmp_path, made, checked, monkeypatch, by):
    real = chunk_cache.ChunkCache._vouch

    def vouch(self, share, sock) -> None:
        if 0 in share[0]:
            os.kill(os.getpid(), by)
        real(self, share, sock)

    monkeypatch.setattr("cmdop_migrate.util.worker_process.ANSWER_TIMEOUT", 0.5)
    monkeypatch.setattr(chunk_cache.ChunkCache, "_vouch", vouch)
    assert fetched(saved, ring, tmp_path / "local") == DATA
    assert 0 in checked
    assert not any(os.path.exists(f"/proc/{pid}") for pid in made)


def test_threads_verify_if_no_process_can_start(saved, ring, tmp_path, checked, monkeypatch):
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", fork)
    assert fetched(saved, ring, tmp_path / "local") == DATA
    assert len(checked) > 2 and len(os.listdir("/proc/self/fd")) == before
