"""Test what is special to the directory store: kill -9 at any moment, a full disk, a read-only one, foreign files."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate.errors import StoreDenied, StoreUnreachable
from cmdop_migrate.storage.local import TMP, TMP_KEEP, LocalStore

# Each object is one byte, repeated: a part or a mixture of two shows at once.
SIZE = 300_000
WRITER = f"""
import sys
from pathlib import Path
from cmdop_migrate.storage.local import LocalStore
store = LocalStore(Path(sys.argv[1]))
seed = int(sys.argv[2])
print("ready", flush=True)
for number in range(10_000):
    store.put("same/x", bytes([(seed + number) % 256]) * {SIZE})
    store.put_new(f"new/{{seed:03d}}/{{number:05d}}", bytes([number % 256]) * {SIZE})
    if number > 3:
        store.delete([f"new/{{seed:03d}}/{{number - 3:05d}}"])
"""
needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")


@pytest.mark.parametrize("part", range(5))
def test_writer_killed_at_any_moment_leaves_complete_objects(tmp_path: Path, part: int) -> None:
    root = tmp_path / "store"
    store = LocalStore(root)
    store.put("same/x", b"\0" * SIZE)
    for seed in range(part * 8, part * 8 + 8):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, root, str(seed)], stdout=subprocess.PIPE)
        try:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            time.sleep(random.uniform(0, 0.06))
        finally:
            writer.kill()
            writer.communicate()
        assert len(store.get("same/x")) == SIZE
        for info in store.list():
            data = store.get(info.name)
            assert info.size == len(data) == SIZE and data == data[:1] * SIZE, info
    litter = list((root / TMP).iterdir())
    assert all(not info.name.startswith(".") for info in store.list())

    # What they left is kept while a living writer may need it, and swept once it is old.
    fresh = root / TMP / "fresh"
    fresh.write_bytes(b"half")
    for old in litter:
        os.utime(old, (time.time() - TMP_KEEP - 10,) * 2)
    LocalStore(root).put("after", b"1")
    assert list((root / TMP).iterdir()) == [fresh]


def test_reading_creates_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "deep" / "store")
    assert list(store.list()) == [] and store.stat("a") is None
    store.delete(["a"])
    assert list(tmp_path.iterdir()) == []
    store.put("a/b", b"1")
    assert store.get("a/b") == b"1"
    for path in (tmp_path / "deep" / "store").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, "images are secrets of their owner"


def test_file_in_place_of_the_store_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    store = LocalStore(file)
    for ask in (lambda: list(store.list()), lambda: store.stat("a"), lambda: store.get("a")):
        with pytest.raises(StoreDenied, match="not a directory"):
            ask()


def test_foreign_files_are_skipped(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"1")
    (tmp_path / "README.TXT").write_text("not ours")
    (tmp_path / "a" / ".nfs0001").write_text("not ours")
    (tmp_path / "a" / "link").symlink_to("/etc/passwd")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "a" / "pipe")
    assert [info.name for info in store.list()] == ["a/b"]
    assert store.stat("a/link") is None and store.stat("a/pipe") is None
    with pytest.raises(StoreDenied, match="cannot read a/link"):
        store.get("a/link")


@pytest.mark.timeout(30)
def test_fifo_in_place_of_an_object_does_not_block(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a/b", b"1")
    os.mkfifo(tmp_path / "store" / "a" / "pipe")
    (tmp_path / "store" / "a" / "symlink").symlink_to("b")
    with pytest.raises(KeyError):
        store.get("a/pipe")
    for name in ("pipe", "symlink"):
        assert not store.link(f"a/{name}", tmp_path / "here") and not os.path.lexists(tmp_path / "here")
    assert store.link("a/b", tmp_path / "here") and (tmp_path / "here").read_bytes() == b"1"


def test_name_that_is_a_folder_of_another_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"1")
    for act in (lambda: store.put("a", b""), lambda: store.put_new("a", b""), lambda: store.put("a/b/c", b"")):
        with pytest.raises(StoreDenied) as caught:
            act()
        assert "directory of its own" in caught.value.hint
    assert [info.name for info in store.list()] == ["a/b"]
    assert list((tmp_path / TMP).iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "cmdop-test", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@needs_mount
@pytest.mark.parametrize("method", ["put", "put_new"])
def test_full_disk(small_disk: Path, method: str) -> None:
    store = LocalStore(small_disk / "store")
    store.put("old/a", b"a" * (1 << 20))
    store.put("old/b", b"b" * (1 << 20))
    free = os.statvfs(small_disk).f_bavail
    for name in ("old/a", "new/c") if method == "put" else ("new/c",):
        with pytest.raises(StoreDenied) as caught:
            getattr(store, method)(name, b"c" * (3 << 20))
        assert "No space left" in caught.value.message and "prune" in caught.value.hint
        assert caught.value.exit == 6
    assert [info.name for info in store.list()] == ["old/a", "old/b"]
    assert store.get("old/a") == b"a" * (1 << 20) and store.get("old/b") == b"b" * (1 << 20)
    assert list((small_disk / "store" / TMP).iterdir()) == []
    assert os.statvfs(small_disk).f_bavail >= free - 2, "nothing partial is left"
    store.put("new/small", b"1")
    store.delete(["old/a"])
    store.put("new/c", b"c" * (2 << 20))
    assert store.get("new/c", 0, 1) == b"c"


@needs_mount
def test_unmounted_disk_is_unreachable(small_disk: Path) -> None:
    """Write nothing below its mount point, where it would be invisible later; count nothing as deleted."""
    store = LocalStore(small_disk)
    store.put("packs/ab/x", b"1")
    assert store.get("packs/ab/x") == b"1"
    subprocess.run(["umount", small_disk], check=True)
    acts = (
        lambda: store.put("packs/ab/y", b"2"),
        lambda: store.put_new("manifests/m", b"2"),
        lambda: store.delete(["packs/ab/x"]),
    )
    try:
        for act in acts:
            with pytest.raises(StoreUnreachable, match="is its disk mounted"):
                act()
        assert list(small_disk.iterdir()) == []
    finally:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "cmdop-test", small_disk], check=True)


@needs_mount
def test_read_only_disk(small_disk: Path) -> None:
    store = LocalStore(small_disk / "store")
    store.put("a", b"1")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for act in (lambda: store.put("b", b""), lambda: store.put_new("b", b""), lambda: store.delete(["a"])):
        with pytest.raises(StoreDenied) as caught:
            act()
        assert "Read-only" in caught.value.message and "mounted writable" in caught.value.hint
    assert store.get("a") == b"1"
    assert store.put_new("a", b"2") is False
