"""What this host has read of a store's indexes: kept on disk, so that the next checkpoint reads only what is new.

One SQLite file for each store and key, as large as need be: memory does not grow with it. It holds nothing that
cannot be had again. A damaged one is thrown away, and where the disk is full nothing is added. Each row has a sum under
a key that only we have: whatever a power cut or a bad disk makes of the file, no wrong place in the store comes of it.
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

UNUSED = 30 * 86400.0  # seconds after which the ledger of a store that nobody came back to is removed
_FORMAT = "1.db"  # how the name of a ledger ends, that is written as here
_BUSY = 2.0  # seconds that another checkpoint of this host may be writing
_CACHE = 8 << 10  # KiB
_SUM = 8
_PLACE = struct.Struct("<III")
_PRIVATE = ""  # SQLite's name for a file of this process's own, which is gone with it
# Good again by itself: no room, no access, another is at it. Whatever else SQLite complains of stays as it is.
_PASSING = {
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
_logger = log.get("images.ledger")


def path_of(folder: Path, store: str, key: MasterKey) -> Path:
    """Where the ledger of a store lies, by its address."""
    return folder / f"{blake3(f'{store} {key.fingerprint}'.encode()).hexdigest(16)}-{_FORMAT}"


class Ledger:
    """Written from one thread; `find` may be called from any, one at a time."""

    def __init__(self, key: MasterKey, path: Path | None = None) -> None:
        """Without a path, what is learnt is forgotten at the end."""
        self._sum_key = key.derive("ledger of chunks")
        self._usable: dict[int, str] = {}
        self.is_broken = False  # nothing more is learnt: no room, another is writing, or it is damaged
        self._path = path
        self._db = self._open()

    def unread(self, named: Iterable[tuple[str, str]]) -> set[str]:
        """Which of these names were not learnt yet, or under another stamp."""
        stamps: dict[str, str] = {}
        with self._suspicious():
            stamps = dict(self._db.execute("SELECT name, stamp FROM sources WHERE typeof(name) = 'text'"))
        return {name for name, stamp in named if stamps.get(name) != stamp}

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """What was learnt from names that are gone."""
        with self._suspicious():
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
        """Of one name, all of it or nothing."""
        with self._suspicious(), self._writing() as db:
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
        """All that were ever named."""
        found: set[str] = set()
        with self._suspicious():
            found.update(pack for (pack,) in self._db.execute("SELECT ident FROM packs"))
        return found

    def rely_on(self, packs: Collection[str]) -> None:
        """From now on `find` answers what lies in these."""
        self._usable = {}
        with self._suspicious():
            rows = self._db.execute("SELECT number, ident FROM packs")
            self._usable = {number: pack for number, pack in rows if pack in packs}

    def find(self, ident: bytes) -> tuple[str, Place] | None:
        """The pack it lies in, and where."""
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
            with suppress(sqlite3.Error):  # SQLite has done so already
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _suspicious(self) -> Iterator[None]:
        """Whatever is wrong with the file, the checkpoint goes on without."""
        try:
            yield
        except sqlite3.Error as error:
            self._give_up(error)

    def _give_up(self, error: sqlite3.Error | struct.error) -> None:
        _logger.warning("what is known of the store is not used: %s", error)
        self._usable, self.is_broken = {}, True
        self._discard(error)

    def _discard(self, error: sqlite3.Error | struct.error) -> None:
        """One that is damaged goes: left there, nothing would be learnt any more. Not for want of room, or because
        another is writing: then it is good later."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)  # none: what is there is no such value
        is_ours = isinstance(error, sqlite3.ProgrammingError)  # a mistake
        if self._path is not None and not is_ours and code & 0xFF not in _PASSING:  # the other bits are details
            _remove(self._path)

    def _open(self) -> sqlite3.Connection:
        for path in (self._path, self._path, None):
            try:
                return _connect(path)
            except (sqlite3.Error, OSError) as error:
                _logger.warning("what was known of the store cannot be read: %s", error)
                if isinstance(error, sqlite3.Error):
                    self._discard(error)
        raise AssertionError("SQLite could not open a file of its own")


def _connect(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _tidy(path)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        os.utime(path)  # it is used
    db = sqlite3.connect(path or _PRIVATE, timeout=_BUSY, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode=WAL")  # a checkpoint that looks something up does not wait for one that writes
        db.execute("PRAGMA synchronous=OFF")
        db.execute(f"PRAGMA cache_size=-{_CACHE}")
        for line in _SCHEMA:
            db.execute(line)
    except BaseException:
        db.close()
        raise
    return db


def _tidy(mine: Path) -> None:
    """Those of stores that nobody came back to go."""
    for path in mine.parent.glob("*.db"):
        with suppress(FileNotFoundError):
            if path != mine and path.stat().st_mtime < walltime() - UNUSED:
                _remove(path)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        with suppress(OSError):  # it is not there; or it stays, and every row of it is checked
            path.with_name(path.name + suffix).unlink()
