"""Test the index cache: useful when intact, harmless when not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
from functools import partial
from pathlib import Path

import pytest

from cmdop_migrate.clock import walltime
from cmdop_migrate.images.format import seal
from cmdop_migrate.images.format.chunk_table import ChunkTable, Place
from cmdop_migrate.images.format.keys import KeyRing, new_key
from cmdop_migrate.images.store import index_cache
from cmdop_migrate.images.store.index_cache import IndexCache

PACK, OTHER = "ab" * 16, "cd" * 16


def chunks(*numbers: int, pack: str = PACK) -> ChunkTable:
    table = ChunkTable()
    table.pack_number(pack)
    for number in numbers:
        table.add(ident(number), Place(0, number * 200, 100 + seal.OVERHEAD, 100 + number))
    return table


def ident(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4


@pytest.fixture
def path(ring: KeyRing, tmp_path: Path) -> Path:
    return index_cache.path_of(tmp_path / "ledgers", "s3://bucket/", ring.current)


@pytest.fixture
def filled(ring: KeyRing, path: Path) -> Path:
    made = IndexCache(ring.current, path)
    made.learn("index/a", "1", chunks(*range(300)))
    made.learn("index/b", "1", chunks(299, 300, pack=OTHER))
    made.close()
    return path


def reopened(ring: KeyRing, path: Path) -> IndexCache:
    found = IndexCache(ring.current, path)
    found.rely_on({PACK, OTHER})
    return found


def test_index_cache_is_persistent_and_private(ring, filled):
    found = reopened(ring, filled)
    assert found.find(ident(7)) == (PACK, Place(1, 1400, 100 + seal.OVERHEAD, 107))
    assert found.find(ident(300)) is not None and found.find(ident(301)) is None
    assert found.unread([("index/a", "1"), ("index/b", "2"), ("index/c", "1")]) == {"index/b", "index/c"}
    assert filled.stat().st_mode & 0o777 == 0o600 and filled.parent.stat().st_mode & 0o777 == 0o700


def test_index_cache_finds_only_chunks_in_usable_packs(ring, filled):
    found = reopened(ring, filled)
    found.rely_on({OTHER})
    assert found.find(ident(7)) is None
    assert found.find(ident(299)) == (OTHER, Place(2, 59800, 100 + seal.OVERHEAD, 399))  # it lies in both
    found.rely_on(())
    assert found.find(ident(299)) is None


def test_index_cache_forgets_deleted_indexes(ring, filled):
    found = reopened(ring, filled)
    found.forget(lambda name: name == "index/a")
    assert found.packs() == {OTHER} and found.find(ident(7)) is None and found.find(ident(299)) is not None
    assert found.unread([("index/a", "1"), ("index/b", "1")]) == {"index/a"}


def test_index_cache_is_separate_per_store_and_key(ring, path, tmp_path):
    assert path != index_cache.path_of(path.parent, "s3://bucket/other", ring.current)
    assert path != index_cache.path_of(path.parent, "s3://bucket/", new_key())


def test_unused_index_cache_is_deleted(ring, filled):
    long_ago = walltime() - index_cache.UNUSED - 60
    os.utime(filled, (long_ago, long_ago))
    other = index_cache.path_of(filled.parent, "s3://elsewhere/", ring.current)
    IndexCache(ring.current, other).close()
    assert list(filled.parent.iterdir()) == [other]
    os.utime(other, (long_ago, long_ago))
    IndexCache(ring.current, other).close()
    assert other.stat().st_mtime > long_ago + 60, "it is used again"


@pytest.mark.parametrize("column", ["start", "length", "size", "pack"])
def test_changed_row_of_the_index_cache_is_ignored(ring, filled, column):
    with sqlite3.connect(filled) as db:
        db.execute(f"UPDATE chunks SET {column} = {column} + 1 WHERE ident = ?", [ident(7)])
    db.close()
    found = reopened(ring, filled)
    assert found.find(ident(7)) is None and found.find(ident(8)) is not None


def test_corrupted_bytes_of_the_index_cache_are_detected(ring, filled):
    """Damage any byte: the cache returns what was written, or nothing."""
    whole = filled.read_bytes()
    told = 0
    for at in range(0, len(whole), 97):
        filled.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        found = reopened(ring, filled)
        for number in range(0, 300, 13):
            answer = found.find(ident(number))
            told += answer is not None
            assert answer is None or answer[1][1:] == (number * 200, 100 + seal.OVERHEAD, 100 + number)
        found.close()
    assert told > 1000


@pytest.mark.parametrize("value", [None, "text", b"bytes", 1.5, -1, 1 << 40])
@pytest.mark.parametrize("column", ["start", "length", "size", "sum"])
def test_invalid_value_costs_the_index_cache_not_the_checkpoint(ring, filled, column, value):
    """Put arbitrary values in place of numbers: SQLite has no checksums of its own."""
    with sqlite3.connect(filled) as db:
        db.execute(f"UPDATE chunks SET {column} = ? WHERE ident = ?", [value, ident(7)])
    db.close()
    found = reopened(ring, filled)
    assert found.find(ident(7)) is None


@pytest.mark.parametrize("value", [None, b"bytes", b"\xff\xfe", 7])
def test_index_cache_forgets_a_source_with_an_invalid_name(ring, filled, value):
    with sqlite3.connect(filled) as db:
        db.execute("UPDATE sources SET name = ? WHERE name = 'index/a'", [value])
    db.close()
    found = reopened(ring, filled)
    found.forget(lambda name: name.startswith("packs/"))
    assert found.unread([("index/a", "1"), ("index/b", "1")]) == {"index/a"}
    found.learn("index/a", "1", chunks(7))
    assert not found.is_broken and found.unread([("index/a", "1")]) == set()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE sources SET name = CAST(x'ff6e616d65' AS TEXT) WHERE name = 'index/a'",
        "ALTER TABLE chunks RENAME COLUMN source TO sauce",
    ],
)
def test_damaged_index_cache_is_deleted(ring, filled, damage):
    """Delete it, because otherwise nothing would ever be cached for this store again."""
    with sqlite3.connect(filled) as db:
        db.execute(damage)
    db.close()
    found = reopened(ring, filled)
    found.unread([("index/a", "1")])
    found.learn("index/c", "1", chunks(7))
    found.forget(lambda name: True)
    found.close()
    again = reopened(ring, filled)
    assert again.unread([("index/a", "1")]) == {"index/a"}
    again.learn("index/a", "1", chunks(7))
    again.learn("index/c", "1", chunks(8))
    again.forget(lambda name: name == "index/c")
    again.rely_on({PACK})
    assert not again.is_broken and again.find(ident(7)) is not None


@pytest.mark.parametrize("content", [b"", b"not a database" * 100, b"SQLite format 3\0" + bytes(4096)])
def test_damaged_index_cache_is_started_anew(ring, filled, content):
    filled.write_bytes(content)
    found = reopened(ring, filled)
    assert found.find(ident(7)) is None
    found.learn("index/a", "1", chunks(7))
    found.rely_on({PACK})
    assert found.find(ident(7)) is not None
    found.close()
    assert reopened(ring, filled).find(ident(7)) is not None


def test_index_cache_without_a_path_works_for_one_checkpoint(ring, tmp_path):
    (tmp_path / "gone").write_text("a file, where a directory should be")
    for path in (None, tmp_path / "gone" / "x.db"):
        found = IndexCache(ring.current, path)
        found.learn("index/a", "1", chunks(7))
        found.rely_on({PACK})
        assert found.find(ident(7)) is not None
        found.close()


def test_full_disk_leaves_the_index_cache_unchanged(ring, filled):
    found = reopened(ring, filled)
    pages = found._db.execute("PRAGMA page_count").fetchone()[0]
    found._db.execute(f"PRAGMA max_page_count={pages + 1}")
    found.learn("index/c", "1", chunks(*range(1000, 9000)))
    assert found.is_broken and found.unread([("index/a", "1"), ("index/c", "1")]) == {"index/c"}
    found.rely_on({PACK})
    assert found.find(ident(7)) is not None and found.find(ident(1000)) is None
    found.close()
    assert reopened(ring, filled).find(ident(7)) is not None


def test_index_cache_killed_while_learning_has_nothing_of_that_index(ring, filled):
    """Kill a writer; the next one continues from there."""

    class Deadly(ChunkTable):
        def rows(self):
            for number, row in enumerate(super().rows()):
                if number == 5000:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield row

    def learn() -> None:
        table = Deadly()
        table.pack_number(PACK)
        for number in range(1000, 9000):
            table.add(ident(number), Place(0, number * 200, 100 + seal.OVERHEAD, 100))
        IndexCache(ring.current, filled).learn("index/c", "1", table)

    child = in_a_process(learn)
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    found = reopened(ring, filled)
    assert found.find(ident(1000)) is None and found.find(ident(7)) is not None
    assert found.unread([("index/a", "1"), ("index/c", "1")]) == {"index/c"}
    found.learn("index/c", "1", chunks(1000))
    assert not found.is_broken and found.find(ident(1000)) is not None


def test_two_processes_write_the_index_cache_concurrently(ring, path):
    """Write different and equal indexes from two processes; equal rows are stored once."""

    def learn(name: str, first: int) -> None:
        found = IndexCache(ring.current, path)
        for number in range(20):
            found.learn(f"index/{name}{number}", "1", chunks(number, first + number, pack=PACK))
        assert not found.is_broken

    both = [in_a_process(partial(learn, name, first)) for name, first in (("a", 1000), ("b", 2000))]
    for child in both:
        child.join(30)
    assert [child.exitcode for child in both] == [0, 0]
    found = reopened(ring, path)
    assert all(found.find(ident(base + number)) for base in (0, 1000, 2000) for number in range(20))


def test_index_cache_rows_of_another_key_are_ignored(filled):
    found = IndexCache(new_key(), filled)
    found.rely_on({PACK, OTHER})
    assert found.find(ident(7)) is None


def in_a_process(act) -> multiprocessing.Process:
    made = multiprocessing.get_context("fork").Process(target=act)
    made.start()
    return made


def test_index_cache_is_readable_while_another_process_writes(ring, filled):
    writer = sqlite3.connect(filled, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM chunks")
    found = reopened(ring, filled)
    assert found.find(ident(7)) is not None
    writer.execute("ROLLBACK")
    writer.close()
