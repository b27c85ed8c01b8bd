"""Record what tells, without reading, that a file of a table has not changed on this host.

Bound to one host and one table, so it is kept in a local file and never travels. Losing it costs time, never
correctness.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, NamedTuple

from cmdop_migrate.images.files.file_table import FileTable

_FORMAT = "cmdop-file-stats-1"
# A second write within one tick of the kernel's coarse clock (10 ms at most) leaves ctime unchanged.
TICK_NS = 20_000_000


class Stat(NamedTuple):
    """Identify the version of a file that was read: a file with the same four values is unchanged."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


Stats = tuple[Stat | None, ...]
"""One per entry of the table; None for an entry that must be read again."""


def stat_of(info: os.stat_result) -> Stat:
    """Return the part of a stat that any change of content or metadata changes."""
    return Stat(info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def settled(stat: Stat | None, now_ns: int) -> Stat | None:
    """Return the stat if a write after `now_ns` is sure to change it, else None."""
    return stat if stat is not None and stat.ctime_ns <= now_ns - TICK_NS else None


def serialise(table: FileTable, stats: Stats) -> bytes:
    """Encode the stats for a local file beside the table."""
    return json.dumps([_FORMAT, _digest(table), *stats], separators=(",", ":")).encode()


def parse(data: bytes, table: FileTable) -> Stats | None:
    """Return the stats, or None if they are damaged or belong to another table: then every file is read again."""
    try:
        form, digest, *rows = json.loads(data)
    except (ValueError, TypeError):
        return None
    if form != _FORMAT or len(rows) != len(table.entries) or digest != _digest(table):
        return None
    return tuple(_row(row) for row in rows)


def _row(row: Any) -> Stat | None:
    if isinstance(row, list) and len(row) == 4 and all(type(part) is int for part in row):
        return Stat(*row)
    return None


def _digest(table: FileTable) -> str:
    return hashlib.blake2b(table.serialise(), digest_size=32).hexdigest()
