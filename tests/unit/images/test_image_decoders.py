"""Decoder processes: the bytes are right even if a decoder dies; a decoder has no file of ours but the image, and ends
with its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cmdop_migrate.criu.lazy.address_space import BLOCK
from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.layout import PAGE
from cmdop_migrate.images.read import reader
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.snapshot import session_memory
from cmdop_migrate.snapshot.rebuild import decode_workers
from cmdop_migrate.storage.base import Store
from cmdop_migrate.storage.local import LocalStore
from cmdop_migrate.storage.memory import MemoryStore
from cmdop_migrate.util import worker_process
from tests.support.host import PROJECT, until
from tests.unit.images.image_helpers import SESSION, SMALL, add_run
from tests.unit.images.image_helpers import memory as content

PID, LAZY = 7, 5  # flags: present, may come later
START = 0x7F0000003000


@pytest.fixture(params=["linked", "copied"])
def image(request: pytest.FixtureRequest, ring: KeyRing, tmp_path: Path) -> Iterator[tuple[reader.Image, bytes]]:
    store: Store = LocalStore(tmp_path / "store") if request.param == "linked" else MemoryStore()
    data = content(3, 200) + bytes(BLOCK * 2) + content(4, 300)
    writer = ImageWriter(store, ring, SESSION, tmp_path / "spill", options=SMALL)
    writer.begin()
    add_run(writer, f"process-{PID}", START, len(data) // PAGE, LAZY, data)
    found = writer.commit(1)
    opened = reader.fetch(store, ring, found.checkpoint, tmp_path / "local")
    yield opened, data
    opened.close()


def decoded(decoder: decode_workers.DecodeWorker, source: session_memory.MemorySource, size: int) -> bytes:
    """All of the memory, stretch by stretch, as the pager asks for it."""
    later, at, got = source.later(PID), START, b""
    while at < START + size:
        start, end = later.stretch(at, min(BLOCK, START + size - at))
        is_data = decoder.fill(later, start, end - start)
        got += bytes(decoder.buffer[: end - start]) if is_data else bytes(end - start)
        at = end
    return got


def test_true_bytes_and_no_process_stays(image: tuple[reader.Image, bytes]) -> None:
    source = session_memory.MemorySource(image[0])
    with decode_workers.started(source) as made:
        for one in made:
            assert isinstance(one, decode_workers.DecodeWorker)
            assert decoded(one, source, len(image[1])) == image[1]
            assert one._is_usable, "it was the process that decoded"
        pids = [one.pid for one in made if isinstance(one, decode_workers.DecodeWorker)]
        assert len(pids) > 1 and all(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_was_killed_or_stopped_is_not_missed(
    image: tuple[reader.Image, bytes], monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    monkeypatch.setattr(worker_process, "ANSWER_TIMEOUT", 0.5)
    source = session_memory.MemorySource(image[0])
    decoder = decode_workers.DecodeWorker(source)
    try:
        os.kill(decoder.pid, by)
        assert decoded(decoder, source, len(image[1])) == image[1]
        assert not decoder._is_usable
        process = psutil.Process(decoder.pid)  # if it kept running, it would write to the buffer that we use now
        until(lambda: process.status() == psutil.STATUS_ZOMBIE, 10, "it is dead")
    finally:
        decoder.close()


def test_without_more_processes_threads_decode(
    image: tuple[reader.Image, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine at its limit restores more slowly, and leaks nothing."""
    fork, left = os.fork, [1]

    def limited() -> int:
        if not left:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        left.pop()
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    source, before = session_memory.MemorySource(image[0]), len(os.listdir("/proc/self/fd"))
    with decode_workers.started(source) as made:
        assert len(made) == 1
    with decode_workers.started(source) as made:
        assert made == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_stopped_one_does_not_keep_us_from_ending(
    image: tuple[reader.Image, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "EXIT_TIMEOUT", 0.1)
    decoder = decode_workers.DecodeWorker(session_memory.MemorySource(image[0]))
    os.kill(decoder.pid, signal.SIGSTOP)
    decoder.close()
    assert not os.path.exists(f"/proc/{decoder.pid}")


def _first(later: session_memory.LazyMemory) -> tuple[int, int]:
    start, end = later.stretch(START, BLOCK)
    return start, end - start


def test_damage_is_refused_here_with_its_reason(image: tuple[reader.Image, bytes], tmp_path: Path) -> None:
    """The local copy is changed after it was verified: nothing but an error comes out."""
    source = session_memory.MemorySource(image[0])
    later = source.later(PID)  # its table was read while all was well
    decoder = decode_workers.DecodeWorker(source)
    try:
        for path in [*(tmp_path / "local").glob("pack-*"), tmp_path / "local" / "chunks"]:
            if path.stat().st_size:
                path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(ImageRefused):
            decoder.fill(later, *_first(later))
        assert not decoder._is_usable
    finally:
        decoder.close()


def test_it_has_nothing_of_ours_but_the_image(image: tuple[reader.Image, bytes], tmp_path: Path) -> None:
    """A lock that it kept would be held as long as it lives."""
    with (tmp_path / "lock").open("w") as lock:
        decoder = decode_workers.DecodeWorker(session_memory.MemorySource(image[0]))
        try:
            assert (
                decoded(decoder, session_memory.MemorySource(image[0]), len(image[1])) == image[1]
            )  # so it is past its start
            kept = [os.readlink(f"/proc/{decoder.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{decoder.pid}/fd")]
            assert lock.name not in kept
            ours = [one for one in kept if one.startswith(str(tmp_path))]
            assert ours and all(str(tmp_path / "local") in one for one in ours)
        finally:
            decoder.close()


def test_it_ends_with_who_started_it() -> None:
    """Killed outright, at any moment."""
    program = textwrap.dedent(
        """
        import os, pathlib, tempfile, time
        from cmdop_migrate.images.read import reader
        from cmdop_migrate.snapshot import session_memory
        from cmdop_migrate.snapshot.rebuild import decode_workers
        from cmdop_migrate.images.format.keys import KeyRing, new_key
        from cmdop_migrate.images.write.writer import ImageWriter
        from cmdop_migrate.storage.memory import MemoryStore
        from tests.unit.images.image_helpers import add_run
        with tempfile.TemporaryDirectory() as folder:
            here, ring, store = pathlib.Path(folder), KeyRing((new_key(),)), MemoryStore()
            writer = ImageWriter(store, ring, "5e5510", here / "spill")
            writer.begin()
            add_run(writer, "process-7", 0x10000, 16, 5, os.urandom(65536))
            image = reader.fetch(store, ring, writer.commit(1).checkpoint, here / "local")
            with decode_workers.started(session_memory.MemorySource(image)) as made:
                print(*[one.pid for one in made], flush=True)
                time.sleep(60)
        """
    )
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout
            pids = [int(word) for word in process.stdout.readline().split()]
            assert len(pids) > 1
        finally:
            process.kill()
    until(lambda: not any(_lives(pid) for pid in pids), 5, "they end when their socket does")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
