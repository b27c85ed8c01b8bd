"""Test capture and restore of plain trees: what is read again, what is refused, how much memory it takes."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from cmdop_migrate.errors import Blocked, ImageRefused, Unexpected
from cmdop_migrate.images.files import capture as files_capture
from cmdop_migrate.images.files import stat_cache
from cmdop_migrate.images.files.capture import Capture, capture
from cmdop_migrate.images.files.content import on_tmpfs
from cmdop_migrate.images.files.file_table import parse
from cmdop_migrate.images.files.unpack import restore
from cmdop_migrate.images.files.walk import measure, walk
from tests.support.file_tree import snapshot
from tests.support.memory_chunks import MemoryChunks

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def _tree(root: Path, files: int = 3000) -> None:
    for number in range(files):
        place = root / f"d{number % 30}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"f{number}").write_bytes(b"%d " % number * 100)
    (root / "large").write_bytes(os.urandom((3 << 20) + 5))


def _settled(root: Path) -> None:
    """Wait out the clock tick in which a file's stat is not trusted yet."""
    if on_tmpfs(root):
        pytest.skip("stats are never trusted on tmpfs")
    time.sleep(2 * stat_cache.TICK_NS / 1e9)


def test_unchanged_files_are_not_read(tmp_path: Path) -> None:
    root = tmp_path / "upper"
    _tree(root)
    _settled(root)
    chunks = MemoryChunks()
    first = capture(root, chunks)
    count = chunks.submitted
    second = capture(root, chunks, previous=first)
    assert chunks.submitted == count
    assert second.table.serialise() == first.table.serialise()
    assert second.stats == first.stats


def test_changed_file_renews_only_its_own_pack(tmp_path: Path) -> None:
    root = tmp_path / "upper"
    _tree(root)
    _settled(root)
    chunks = MemoryChunks()
    first = capture(root, chunks)
    (root / "d7" / "f7").write_bytes(b"longer than before" * 40)
    (root / "d20" / "added").write_bytes(b"new")
    (root / "d25" / "f25").unlink()
    new = chunks.new_bytes
    second = capture(root, chunks, previous=first)
    assert second.table == capture(root, MemoryChunks()).table, "previous must only save reading"
    total = sum(map(len, chunks.held.values()))
    assert 0 < chunks.new_bytes - new < total / 3
    (tmp_path / "again").mkdir()
    restore(second.table, chunks, tmp_path / "again")
    assert snapshot(tmp_path / "again") == snapshot(root)


def test_deleted_content_is_not_kept_in_a_reused_chunk(tmp_path: Path) -> None:
    root = tmp_path / "upper"
    root.mkdir()
    (root / "a").write_bytes(b"kept")
    (root / "b").write_bytes(b"secret")
    _settled(root)
    chunks = MemoryChunks()
    first = capture(root, chunks)
    (root / "b").unlink()
    second = capture(root, chunks, previous=first)
    assert [chunks.held[ref] for ref in second.table.chunks] == [b"kept"]


def test_file_chunks_lost_by_the_store_are_submitted_again(tmp_path: Path) -> None:
    root = tmp_path / "upper"
    _tree(root, 10)
    _settled(root)
    chunks = MemoryChunks()
    first = capture(root, chunks)
    lost = MemoryChunks()
    second = capture(root, lost, previous=first, present=lambda ref: ref in lost.held)
    assert set(second.table.chunks) == set(lost.held)


def test_mapped_files_are_read_under_every_name(tmp_path: Path) -> None:
    root = tmp_path / "upper"
    root.mkdir()
    (root / "a").write_bytes(bytes(100_000))
    os.link(root / "a", root / "b")
    _settled(root)
    chunks = MemoryChunks()
    first = capture(root, chunks)
    capture(root, chunks, previous=first, mapped={b"b", b"not/here"})
    assert chunks.submitted == 2
    assert capture(root, chunks, mapped={b"b"}).stats[1] is None


def test_a_restore_leaves_stats_for_the_next_capture(tmp_path: Path) -> None:
    root, again = tmp_path / "upper", tmp_path / "again"
    _tree(root)
    os.link(root / "large", root / "zz")
    again.mkdir()
    chunks = MemoryChunks()
    table = capture(root, chunks).table
    stats = restore(table, chunks, again)
    _settled(root)
    count = chunks.submitted
    assert capture(again, chunks, previous=Capture(table, stats)).table == table
    # The last few files were made within the clock tick and are read once more.
    assert chunks.submitted - count <= 8


def test_stats_just_taken_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hot").write_bytes(b"1")
    written = (tmp_path / "hot").stat().st_ctime_ns
    monkeypatch.setattr(files_capture, "walltime", lambda: written / 1e9 + 0.01)
    assert capture(tmp_path, MemoryChunks()).stats == (None, None)
    monkeypatch.setattr(files_capture, "walltime", lambda: written / 1e9 + 0.03)
    assert capture(tmp_path, MemoryChunks()).stats[1] is not None


def test_capture_of_a_missing_root_fails(tmp_path: Path) -> None:
    with pytest.raises(Unexpected, match="nowhere"):
        capture(tmp_path / "nowhere", MemoryChunks())


class _Meddling(MemoryChunks):
    """Change a file while another chunk is submitted."""

    def __init__(self, victim: Path) -> None:
        super().__init__()
        self._victim = victim

    def submit(self, data: bytes | memoryview) -> Future[str]:
        if self._victim.exists() and self._victim.stat().st_size:
            os.truncate(self._victim, 0)
        return super().submit(data)


@pytest.mark.parametrize("size", [200, 5 << 20])
def test_file_that_shrinks_during_a_capture_is_an_error(tmp_path: Path, size: int) -> None:
    victim = tmp_path / "a"
    victim.write_bytes(os.urandom(size))
    (tmp_path / "b").write_bytes(os.urandom(2 << 20))
    with pytest.raises(Blocked, match="a changed"):
        capture(tmp_path, _Meddling(victim))
    victim.write_bytes(os.urandom(size))
    live = capture(tmp_path, _Meddling(victim), live=True)
    assert parse(live.table.serialise()) == live.table
    assert live.table.entries[1].extents == () and live.stats[1] is None
    with pytest.raises(ImageRefused, match="running"):
        restore(live.table, MemoryChunks(), tmp_path)


def test_live_capture_survives_a_busy_tree(tmp_path: Path) -> None:
    _tree(tmp_path, 400)
    stop = threading.Event()

    def churn() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            place = tmp_path / f"d{number % 30}"
            (place / f"x{number}").write_bytes(b"x" * (number % 5000))
            (place / f"x{number - 40}").unlink(missing_ok=True)
            os.truncate(place / f"f{number % 30}", number % 999)

    busy = threading.Thread(target=churn)
    busy.start()
    try:
        for _ in range(5):
            table = capture(tmp_path, MemoryChunks(), live=True).table
            assert parse(table.serialise()) == table
            assert measure(tmp_path).files > 400
    finally:
        stop.set()
        busy.join()


def test_live_capture_survives_a_moved_directory(tmp_path: Path) -> None:
    """Move directories, as builds and package managers often do: no reason to refuse a checkpoint."""
    for name in ("a/b/c/deep", "a/b/z", "a/z", "z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "elsewhere").mkdir()

    def paths(at: bytes, meddle: Callable[[], None]) -> list[bytes]:
        seen = []
        for node in walk(tmp_path, live=True):
            seen.append(node.path)
            if node.path == at:
                meddle()
        return seen

    moved = paths(b"a/b/c/deep", lambda: (tmp_path / "a/b/c").rename(tmp_path / "elsewhere/c"))
    assert moved[-6:] == [b"a/b/z", b"a/z", b"elsewhere", b"elsewhere/c", b"elsewhere/c/deep", b"z"]
    moved = paths(b"a/b/z", lambda: (tmp_path / "a").rename(tmp_path / "elsewhere/a"))
    assert moved[-3:] == [b"elsewhere/c", b"elsewhere/c/deep", b"z"]

    def replace() -> None:
        (tmp_path / "elsewhere/c/deep").unlink()
        (tmp_path / "elsewhere/c").rmdir()
        (tmp_path / "elsewhere/c").write_bytes(b"a file now")

    assert paths(b"elsewhere/c", replace)[-2:] == [b"elsewhere/c", b"z"]
    with pytest.raises(Blocked, match="changed"):
        for node in walk(tmp_path):
            if node.path == b"elsewhere/a/b":
                (tmp_path / "elsewhere/a/b").rename(tmp_path / "b")


@pytest.mark.parametrize("seconds", [-(1 << 63), -5_364_662_400, 1_700_000_000_000, (1 << 63) - 1])
def test_any_file_mtime_round_trips(seconds: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:  # it keeps times that ext4 cannot
        root, again = Path(place, "upper"), Path(place, "again")
        for directory in (root, again):
            directory.mkdir()
        (root / "f").write_bytes(b"data")
        os.utime(root / "f", ns=(0, seconds * 10**9))
        assert (root / "f").stat().st_mtime_ns == seconds * 10**9
        chunks = MemoryChunks()
        restore(parse(capture(root, chunks).table.serialise()), chunks, again)
        assert snapshot(again)[b"f"] == snapshot(root)[b"f"]


def test_restore_fills_only_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "f").write_text("x")
    chunks = MemoryChunks()
    table = capture(tmp_path / "from", chunks).table
    with pytest.raises(Blocked, match="not empty"):
        restore(table, chunks, tmp_path / "from")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(Blocked):
        restore(table, chunks, tmp_path / "link")
    with pytest.raises(Blocked):
        restore(table, chunks, tmp_path / "nowhere")
    assert os.listdir(tmp_path / "real") == []


def test_restore_refuses_a_short_chunk(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "f").write_bytes(os.urandom(100_000))
    chunks = MemoryChunks()
    table = capture(tmp_path / "from", chunks).table
    chunks.held = {ref: data[:-1] for ref, data in chunks.held.items()}
    (tmp_path / "to").mkdir()
    with pytest.raises(ImageRefused, match="shorter"):
        restore(table, chunks, tmp_path / "to")


def test_restore_creates_devices_only_if_allowed(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    os.mknod(tmp_path / "from" / "disk", 0o60600, os.makedev(8, 0))
    os.mknod(tmp_path / "from" / "null", 0o20666, os.makedev(1, 3))
    assert measure(tmp_path / "from").devices == (b"disk",)
    table = capture(tmp_path / "from", MemoryChunks()).table
    assert table.devices == (b"disk",)
    (tmp_path / "to").mkdir()
    restore(table, MemoryChunks(), tmp_path / "to", allow_devices=True)
    assert snapshot(tmp_path / "to") == snapshot(tmp_path / "from")


def test_capture_excludes_paths(tmp_path: Path) -> None:
    _tree(tmp_path, 60)
    table = capture(tmp_path, MemoryChunks(), exclude={b"d1", b"large"}).table
    paths = {path for path, _ in table.paths()}
    assert b"d2/f2" in paths
    assert not {path for path in paths if path.startswith(b"d1/")} | {b"d1", b"large"} & paths


class _Discarding:
    """Keep only what it takes to make the bytes again."""

    def submit(self, data: bytes | memoryview) -> Future[str]:
        done: Future[str] = Future()
        done.set_result(f"{data[0]:02x}{len(data):014x}")
        return done

    def read(self, ref: str) -> bytes:
        return bytes([int(ref[:2], 16)]) * int(ref[2:], 16)


def test_capture_memory_does_not_grow_with_file_size(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    with (tmp_path / "from" / "big").open("wb") as big:
        for number in range(192):
            big.write(bytes([number]) * (1 << 20))
        big.truncate(1 << 40)
    tracemalloc.start()
    try:
        table = capture(tmp_path / "from", _Discarding()).table
        captured = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        restore(table, _Discarding(), tmp_path / "to")
        restored = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert captured < 8 << 20
    assert restored < 40 << 20
    assert subprocess.run(["cmp", "-n", str(193 << 20), tmp_path / "from/big", tmp_path / "to/big"]).returncode == 0
    assert os.stat(tmp_path / "to" / "big").st_size == 1 << 40
