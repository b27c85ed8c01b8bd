"""Capture the files a session changed: its overlay's upper directory as a table and chunks.

Large files are cut every 1 MiB. Small ones are gathered, in the order of the walk, into packs of one chunk each; where
a pack ends depends on sizes and names only, so a change in one file renews its own pack and leaves the others as they
were, here and on any other host. Holes are not stored.

The table is the same with or without `previous`, which only saves reading.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from cmdop_migrate.clock import walltime
from cmdop_migrate.errors import Blocked, Unexpected
from cmdop_migrate.images.files.content import Segments, on_tmpfs, parts, segments, whole
from cmdop_migrate.images.files.file_table import (
    BLOCK,
    CHAR,
    CHUNK,
    DIRECTORY,
    FIFO,
    FILE,
    HARDLINK,
    LINKABLE,
    MAX_SIZE,
    SOCKET,
    SYMLINK,
    WHITEOUT,
    Entry,
    Extent,
    FileTable,
)
from cmdop_migrate.images.files.stat_cache import Stat, Stats, settled, stat_of
from cmdop_migrate.images.files.walk import Cursor, Node, changed, read_xattrs, walk

SMALL = 64 << 10
_PACK_LEAST = 128 << 10
_PACK_ENDS_AT_ONE_IN = 8
_NO_DEVICE = (0, 0)
_KINDS = {
    stat.S_IFDIR: DIRECTORY,
    stat.S_IFREG: FILE,
    stat.S_IFLNK: SYMLINK,
    stat.S_IFIFO: FIFO,
    stat.S_IFSOCK: SOCKET,
    stat.S_IFCHR: CHAR,
    stat.S_IFBLK: BLOCK,
}


class ChunkSink(Protocol):
    """Accept chunks. `submit` may block: it bounds the memory in flight."""

    def submit(self, data: bytes | memoryview) -> Future[str]:
        """Take up to 1 MiB, and return a future of its id in hex, done once the chunk is safe."""


class ChunkSource(Protocol):
    """Provide chunks. Called from several threads simultaneously."""

    def read(self, ref: str) -> bytes:
        """Return the chunk, verified."""


@dataclass(frozen=True)
class Capture:
    """Hold a table, and the stats by which the next capture on this host skips unchanged files."""

    table: FileTable
    stats: Stats


def capture(
    root: Path,
    sink: ChunkSink,
    *,
    previous: Capture | None = None,
    exclude: Collection[bytes] = frozenset(),
    mapped: Collection[bytes] = frozenset(),
    present: Callable[[str], bool] | None = None,
    live: bool = False,
) -> Capture:
    """Record the tree under `root`, which must not change meanwhile, unless `live`.

    `previous`: an earlier capture of the same directory under the same key; `present` tells whether a chunk of it is
    still in the store. `exclude`: relative paths left out with everything below. `mapped`: files that a process maps
    shared and writable; a store to memory updates no timestamp, so these are read every time. `live`: the session runs;
    a file that changes meanwhile is recorded as empty, and the table is marked unfit for a restore. Raise Unexpected if
    a file cannot be read.
    """
    path = b""
    try:
        if previous is not None and on_tmpfs(root):
            previous = None  # on tmpfs a write through a mapping never updates a timestamp
        with closing(_Work(root, sink, previous, present, live)) as work:
            work.distrust(mapped)
            for node in walk(root, frozenset(exclude), live=live):
                path = node.path
                work.visit(node)
            work.end_pack()
            chunks = tuple(slot if isinstance(slot, str) else slot.result() for slot in work.slots)
    except OSError as error:
        raise Unexpected(
            f"cannot read the session's files in {root}, at {os.fsdecode(path) or 'the root'}: {error.strerror}",
            "The session keeps running. Check the disk (`dmesg`), then checkpoint again.",
        ) from error
    return Capture(FileTable(tuple(work.entries), chunks, live), tuple(work.stats))


class _Member(NamedTuple):
    """Describe a small file in the pack now being gathered."""

    entry: int
    node: Node
    segments: Segments
    known: Entry | None


class _Work:
    """Hold the state of one capture."""

    def __init__(
        self,
        root: Path,
        sink: ChunkSink,
        previous: Capture | None,
        present: Callable[[str], bool] | None,
        live: bool,
    ) -> None:
        self.entries: list[Entry] = []
        self.stats: list[Stat | None] = []
        self.slots: list[Future[str] | str] = []
        self._sink = sink
        self._live = live
        self._began = int(walltime() * 1e9)
        self._links: dict[int, int] = {}
        self._mapped: set[int] = set()
        self._pack: list[_Member] = []
        self._pack_slot = 0
        self._pack_size = 0
        self._old: dict[bytes, tuple[Stat, Entry]] = {}
        self._old_chunks: tuple[str, ...] = ()
        self._old_used: dict[int, int] = {}
        if previous is not None:
            self._remember(previous, present)
        # Members of a pack are read when the pack ends; by then the walk is in another directory.
        self._cursor = Cursor(root)

    def close(self) -> None:
        self._cursor.close()

    def distrust(self, paths: Collection[bytes]) -> None:
        """Read these files even if their stat is unchanged, under all their names."""
        for path in paths:
            *directory, name = path.split(b"/")
            try:
                self._cursor.go(tuple(directory))
                self._mapped.add(os.stat(name, dir_fd=self._cursor.fd, follow_symlinks=False).st_ino)
            except (FileNotFoundError, NotADirectoryError):
                continue  # mapped from the lower layer, so not in this tree

    def visit(self, node: Node) -> None:
        """Add one name to the table."""
        info = node.stat
        kind = _KINDS[stat.S_IFMT(info.st_mode)]
        if kind == CHAR and info.st_rdev == 0:
            kind = WHITEOUT
        depth = len(node.directory) + 1 if node.name else 0
        linked = info.st_nlink > 1 and kind in LINKABLE
        if linked and info.st_ino in self._links:
            self._add(Entry(HARDLINK, depth, node.name, link=self._links[info.st_ino]))
            return
        seen = stat_of(info) if kind == FILE and info.st_ino not in self._mapped else None
        known = self._known(node.path, seen) if seen is not None else None
        extents: tuple[Extent, ...] | None = ()
        try:
            xattrs = read_xattrs(node) if known is None else known.xattrs
            target = os.readlink(node.name, dir_fd=node.fd) if kind == SYMLINK else b""
        except OSError as error:
            if self._live and error.errno in (errno.ENOENT, errno.ENODATA) and kind != DIRECTORY:
                return
            raise
        if linked:
            self._links[info.st_ino] = len(self.entries)
        if kind == FILE:
            extents = self._file(node, known)
        entry = Entry(
            kind,
            depth,
            node.name,
            0o777 if kind == SYMLINK else stat.S_IMODE(info.st_mode),
            info.st_uid,
            info.st_gid,
            info.st_mtime_ns,
            xattrs,
            info.st_size if kind == FILE else 0,
            extents or (),
            target,
            -1,
            (os.major(info.st_rdev), os.minor(info.st_rdev)) if kind in (CHAR, BLOCK) else _NO_DEVICE,
        )
        self._add(entry, seen)
        if extents is None:
            self._forget(-1)
        if self._pack_size >= _PACK_LEAST and zlib.crc32(self._pack[-1].node.name) % _PACK_ENDS_AT_ONE_IN == 0:
            self.end_pack()

    def end_pack(self) -> None:
        """Send the small files gathered so far as one chunk, or reuse the chunk they had."""
        if not self._pack:
            return
        before = self._pack_before()
        self.slots[self._pack_slot] = before if before is not None else self._sink.submit(self._read_pack())
        self._pack.clear()
        self._pack_size = 0

    def _read_pack(self) -> bytes:
        data = []
        for member in self._pack:
            try:
                self._cursor.go(member.node.directory)
                data.append(whole(self._cursor.fd, member.node, member.segments))
            except (Blocked, FileNotFoundError, NotADirectoryError) as error:
                if not self._live:
                    raise changed(member.node.path) from error
                self._forget(member.entry)
                data.append(bytes(sum(length for _, length in member.segments)))
        return b"".join(data)

    def _add(self, entry: Entry, known_by: Stat | None = None) -> None:
        self.entries.append(entry)
        self.stats.append(settled(known_by, self._began))

    def _forget(self, number: int) -> None:
        """Leave a file that changed during a live capture empty: the next capture reads it."""
        self.entries[number] = self.entries[number]._replace(size=0, extents=())
        self.stats[number] = None

    def _file(self, node: Node, known: Entry | None) -> tuple[Extent, ...] | None:
        """Return where the data of a file is, or will be when its pack ends. Return None if it changed during a live
        capture."""
        if node.stat.st_size > MAX_SIZE:
            raise Blocked(f"{os.fsdecode(node.path)} is larger than an image can hold", "Truncate or remove it.")
        slots = len(self.slots)
        try:
            where = segments(node) if known is None else tuple((part.offset, part.length) for part in known.extents)
            size = sum(length for _, length in where)
            if 0 < size < SMALL:
                return self._gather(_Member(len(self.entries), node, where, known), size)
            return self._cut(node, where) if known is None else self._reuse(known)
        except Blocked:
            if not self._live:
                raise
            del self.slots[slots:]
            return None

    def _gather(self, member: _Member, size: int) -> tuple[Extent, ...]:
        if self._pack_size + size > CHUNK:
            self.end_pack()
        if not self._pack:
            self._pack_slot = len(self.slots)
            self.slots.append("")
        extents = []
        for offset, length in member.segments:
            extents.append(Extent(offset, length, self._pack_slot, self._pack_size))
            self._pack_size += length
        self._pack.append(member)
        return tuple(extents)

    def _cut(self, node: Node, where: Segments) -> tuple[Extent, ...]:
        """Send one chunk for each 1 MiB of the file that has any data."""
        extents: list[Extent] = []
        window = -1
        held: list[bytes] = []
        at = 0
        for offset, part in parts(node.fd, node, where):
            if offset // CHUNK != window:
                self._send(held)
                window, held, at = offset // CHUNK, [], 0
                self.slots.append("")
            extents.append(Extent(offset, len(part), len(self.slots) - 1, at))
            held.append(part)
            at += len(part)
        self._send(held)
        return tuple(extents)

    def _send(self, held: list[bytes]) -> None:
        if held:
            self.slots[-1] = self._sink.submit(held[0] if len(held) == 1 else b"".join(held))

    def _reuse(self, known: Entry) -> tuple[Extent, ...]:
        extents = []
        last = -1
        for part in known.extents:
            if part.chunk != last:
                self.slots.append(self._old_chunks[part.chunk])
                last = part.chunk
            extents.append(part._replace(chunk=len(self.slots) - 1))
        return tuple(extents)

    def _pack_before(self) -> str | None:
        """Return the chunk that holds exactly these small files, unchanged, in this order; None if they must be
        read."""
        at = 0
        chunk = -1
        for member in self._pack:
            if member.known is None:
                return None
            for part in member.known.extents:
                chunk = part.chunk if chunk < 0 else chunk
                if part.chunk != chunk or part.at != at:
                    return None
                at += part.length
        # A longer chunk would keep data that has been deleted since.
        return self._old_chunks[chunk] if self._old_used[chunk] == at else None

    def _remember(self, previous: Capture, present: Callable[[str], bool] | None) -> None:
        table = previous.table
        self._old_chunks = table.chunks
        usable = [present is None or present(ref) for ref in table.chunks]
        for (path, entry), seen in zip(table.paths(), previous.stats, strict=True):
            for part in entry.extents:
                self._old_used[part.chunk] = max(self._old_used.get(part.chunk, 0), part.at + part.length)
            if seen is not None and entry.kind == FILE and all(usable[part.chunk] for part in entry.extents):
                self._old[path] = seen, entry

    def _known(self, path: bytes, now: Stat) -> Entry | None:
        seen = self._old.get(path)
        return seen[1] if seen is not None and seen[0] == now else None
