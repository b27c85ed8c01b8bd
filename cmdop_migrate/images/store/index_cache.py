"""Cache on disk what this host has read of a store's indexes, so that the next checkpoint reads only new ones.

There is one SQLite file per store and key. Memory does not grow with it. It holds nothing that cannot be read again: a
damaged file is deleted, and on a full disk nothing is added. Each row carries a MAC under a key that only this
installation has, so a power cut or a bad disk can never produce a wrong place in the store.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.clock import walltime
from cmdop_migrate.images.format.chunk_table import ChunkTable, Place
from cmdop_migrate.images.format.keys import MasterKey
from cmdop_migrate.util.digest import blake3

UNUSED = 30 * 86400.0  # seconds without use after which a cache file is deleted
_FORMAT = "1.db"  # suffix of the file name: format version 1
_BUSY_TIMEOUT = 2.0  # seconds to wait for another checkpoint of this host that is writing
_CACHE = 8 << 10  # KiB
_SUM = 8
_PLACE = struct.Struct("<III")
_PRIVATE = ""  # SQLite's name for a temporary file private to the connection
# Errors that pass by themselves: no room, no access, another writer. All others are permanent.
_TRANSIENT = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_PROTOCOL,
}  # fmt: skip
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS sources (number INTEGER PRIMARY KEY, name TEXT UNIQUE, stamp TEXT)",
    "CREATE TABLE IF NOT EXISTS packs (number INTEGER PRIMARY KEY, ident TEXT UNIQUE)",
    "CREATE TABLE IF NOT EXISTS chunks (ident BLOB, pack INTEGER, start INTEGER, length INTEGER, size INTEGER,"
    " sum BLOB, source INTEGER, PRIMARY KEY (ident, pack)) WITHOUT ROWID",
)
_logger = log.get("images.index_cache")


def path_of(folder: Path, store: str, key: MasterKey) -> Path:
    """Return the path of the index cache of a store, by its address and the key."""
    return folder / f"{blake3(f'{store} {key.fingerprint}'.encode()).hexdigest(16)}-{_FORMAT}"


class IndexCache:
    """Cache index contents of one store and key. Write from one thread; call `find` from any, one at a time."""

    def __init__(self, key: MasterKey, path: Path | None = None) -> None:
        """Open or create the file. Without a path, the content is dropped at the end."""
        self._sum_key = key.derive("ledger of chunks")
        self._usable: dict[int, str] = {}
        self.is_broken = False  # nothing more is added: no room, another writer, or a damaged file
        self._path = path
        self._db = self._open()

    def unread(self, named: Iterable[tuple[str, str]]) -> set[str]:
        """Return the names that are not cached yet, or are cached under another stamp."""
        stamps: dict[str, str] = {}
        with self._tolerant():
            stamps = dict(self._db.execute("SELECT name, stamp FROM sources WHERE typeof(name) = 'text'"))
        return {name for name, stamp in named if stamps.get(name) != stamp}

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Delete what was read from names that are gone from the store."""
        with self._tolerant():
            rows = self._db.execute("SELECT number, name FROM sources")
            gone = [row for row in rows if not isinstance(row[1], str) or is_gone(row[1])]
            if not gone:
                return
            with self._writing() as db:
                db.execute("CREATE TEMP TABLE IF NOT EXISTS gone (number INTEGER PRIMARY KEY)")
                db.execute("DELETE FROM gone")
                db.executemany("INSERT INTO gone VALUES (?)", ([number] for number, _ in gone))
                db.execute("DELETE FROM chunks WHERE source IN (SELECT number FROM gone)")
                db.execute("DELETE FROM sources WHERE number IN (SELECT number FROM gone)")
                db.execute("DELETE FROM packs WHERE number NOT IN (SELECT pack FROM chunks)")

    def learn(self, name: str, stamp: str, table: ChunkTable) -> None:
        """Record all chunks of one index, atomically."""
        with self._tolerant(), self._writing() as db:
            db.execute("INSERT OR IGNORE INTO sources (name) VALUES (?)", [name])
            db.execute("UPDATE sources SET stamp = ? WHERE name = ?", [stamp, name])
            [source] = db.execute("SELECT number FROM sources WHERE name = ?", [name]).fetchone()
            db.executemany("INSERT OR IGNORE INTO packs (ident) VALUES (?)", ([pack] for pack in table.packs))
            numbers = [
                db.execute("SELECT number FROM packs WHERE ident = ?", [pack]).fetchone()[0] for pack in table.packs
            ]
            rows = (
                (ident, numbers[pack], *place, self._sum(ident, table.packs[pack], *place), source)
                for ident, pack, *place in table.rows()
            )
            db.executemany("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def packs(self) -> set[str]:
        """Return all packs named by any cached index."""
        packs: set[str] = set()
        with self._tolerant():
            packs.update(pack for (pack,) in self._db.execute("SELECT ident FROM packs"))
        return packs

    def rely_on(self, packs: Collection[str]) -> None:
        """Restrict `find` to chunks in these packs."""
        self._usable = {}
        with self._tolerant():
            rows = self._db.execute("SELECT number, ident FROM packs")
            self._usable = {number: pack for number, pack in rows if pack in packs}

    def find(self, ident: bytes) -> tuple[str, Place] | None:
        """Return the pack that holds the chunk and its place there, or None."""
        if not self._usable:
            return None
        try:
            rows = self._db.execute("SELECT pack, start, length, size, sum FROM chunks WHERE ident = ?", [ident])
            for number, start, length, size, digest in rows:
                pack = self._usable.get(number)
                if pack is not None and digest == self._sum(ident, pack, start, length, size):
                    return pack, Place(number, start, length, size)
        except (sqlite3.Error, struct.error) as error:
            self._give_up(error)
        return None

    def close(self) -> None:
        self._usable = {}
        self._db.close()

    def _sum(self, ident: bytes, pack: str, *place: int) -> bytes:
        return blake3(ident + bytes.fromhex(pack) + _PLACE.pack(*place), key=self._sum_key).digest(_SUM)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite may have rolled back already
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Let the checkpoint continue without the cache on any SQLite error."""
        try:
            yield
        except sqlite3.Error as error:
            self._give_up(error)

    def _give_up(self, error: sqlite3.Error | struct.error) -> None:
        _logger.warning("the index cache is not used: %s", error)
        self._usable, self.is_broken = {}, True
        self._discard(error)

    def _discard(self, error: sqlite3.Error | struct.error) -> None:
        """Delete a damaged file, because it would accept no more rows. Keep it after a transient error (no room,
        another writer): it works again later."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)  # no code: a value of the wrong type
        is_bug = isinstance(error, sqlite3.ProgrammingError)  # in this code, not in the file
        if self._path is not None and not is_bug and code & 0xFF not in _TRANSIENT:  # the higher bits are details
            _remove(self._path)

    def _open(self) -> sqlite3.Connection:
        for path in (self._path, self._path, None):
            try:
                return _connect(path)
            except (sqlite3.Error, OSError) as error:
                _logger.warning("cannot open the index cache: %s", error)
                if isinstance(error, sqlite3.Error):
                    self._discard(error)
        raise AssertionError("SQLite could not open a temporary file")


def _connect(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _delete_unused(path)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        os.utime(path)  # marks it as used
    db = sqlite3.connect(path or _PRIVATE, timeout=_BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode=WAL")  # a checkpoint that reads does not wait for one that writes
        db.execute("PRAGMA synchronous=OFF")
        db.execute(f"PRAGMA cache_size=-{_CACHE}")
        for line in _SCHEMA:
            db.execute(line)
    except BaseException:
        db.close()
        raise
    return db


def _delete_unused(mine: Path) -> None:
    """Delete cache files not used for 30 days."""
    for path in mine.parent.glob("*.db"):
        with suppress(FileNotFoundError):
            if path != mine and path.stat().st_mtime < walltime() - UNUSED:
                _remove(path)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        with suppress(OSError):  # it is missing; or it stays, which is harmless: every row is authenticated
            path.with_name(path.name + suffix).unlink()
