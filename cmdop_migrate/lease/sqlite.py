"""Keep leases in a SQLite file: `sqlite:///file`. One machine, any number of processes.

Not for a network file system: SQLite's locks are not reliable there.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from cmdop_migrate.errors import LeaseUnreachable
from cmdop_migrate.lease.record import can_name_lease, check_session
from cmdop_migrate.lease.register import Cell, Register, Swap

_TABLE = "CREATE TABLE IF NOT EXISTS lease (session TEXT PRIMARY KEY, data BLOB NOT NULL, version INTEGER NOT NULL)"
_INSERT = "INSERT INTO lease (session, data, version) VALUES (?, ?, 1) ON CONFLICT DO NOTHING"
_UPDATE = "UPDATE lease SET data = ?, version = version + 1 WHERE session = ? AND version = ?"


class SqliteRegister(Register):
    """Hold one record per session in a table. The file and its directory are created at the first use, for the owner
    only."""

    batch = 500

    def __init__(self, path: Path, timeout: float = 3.0) -> None:
        self.url = f"sqlite://{path}"
        self.path = path
        self._timeout = timeout
        self._lock = threading.Lock()
        self._open: tuple[sqlite3.Connection, tuple[int, int], int] | None = None

    def read(self, session: str) -> Cell | None:
        check_session(session)
        with self._connected("read") as db:
            row = db.execute("SELECT data, version FROM lease WHERE session = ?", (session,)).fetchone()
        return None if row is None else Cell(bytes(row[0]), str(row[1]))

    def write(self, swap: Swap) -> str | None:
        check_session(swap.session)
        with self._connected("write") as db, _immediate(db):
            return _swap(db, swap)

    def write_many(self, swaps: Sequence[Swap]) -> list[str | LeaseUnreachable | None]:
        """Write all swaps in one transaction, so with one wait for the disk. Each swap succeeds or fails by itself; a
        failure of the disk is common to all."""
        for swap in swaps:
            check_session(swap.session)
        try:
            with self._connected("write") as db, _immediate(db):
                return [_swap(db, swap) for swap in swaps]
        except LeaseUnreachable as error:
            return [error] * len(swaps)

    def sessions(self) -> Iterator[str]:
        with self._connected("list") as db:
            rows = db.execute("SELECT session FROM lease ORDER BY session").fetchall()
        return (session for (session,) in rows if isinstance(session, str) and can_name_lease(session))

    def close(self) -> None:
        with self._lock:
            self._drop()

    @contextlib.contextmanager
    def _connected(self, what: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._connection()
            except (sqlite3.Error, OSError) as error:
                self._drop()
                raise LeaseUnreachable(
                    f"cannot {what} the lease in {self.path}: {error}",
                    "Check the disk, the file's owner and mode, and that nothing else keeps it locked.",
                ) from error

    def _connection(self) -> sqlite3.Connection:
        if self._open is not None:
            db, opened, pid = self._open
            # Removed or replaced by a copy: writing to the old file would leave two diverging sets of leases.
            if _identity(self.path) == opened and pid == os.getpid():
                return db
            self._drop()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _identity(self.path) is None:
            # Only if it does not exist yet: closing a descriptor of the file makes the kernel drop every lock this
            # process has on it, those of other connections too. The next process then takes itself for the only one,
            # removes the log that is still in use, and there are two diverging sets of leases.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        identity = _identity(self.path)
        assert identity is not None
        db = sqlite3.connect(self.path, timeout=self._timeout, isolation_level=None, check_same_thread=False)
        self._open = db, identity, os.getpid()
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(_TABLE)
        return db

    def _drop(self) -> None:
        opened, self._open = self._open, None
        # After a fork the connection is the parent's: closing it here would drop the parent's locks.
        if opened is not None and opened[2] == os.getpid():
            opened[0].close()


@contextlib.contextmanager
def _immediate(db: sqlite3.Connection) -> Iterator[None]:
    """Run one write transaction, begun as such, so that nothing is read that another may change before the write."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _swap(db: sqlite3.Connection, swap: Swap) -> str | None:
    if swap.expected is None:
        return "1" if db.execute(_INSERT, (swap.session, swap.data)).rowcount == 1 else None
    if not swap.expected.isdecimal():
        return None
    before = int(swap.expected)
    return str(before + 1) if db.execute(_UPDATE, (swap.data, swap.session, before)).rowcount == 1 else None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino
