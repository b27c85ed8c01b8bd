"""Define the table of a file layer: what an overlay's upper directory held, as it travels in an image.

The entries are a walk of the tree, parents before children, siblings in byte order. An entry carries its name and its
depth, never a path, so a table that parses cannot point outside the tree or through a symlink: an entry one level
deeper than its predecessor needs that predecessor to be a directory.

On the wire: JSON lines in ASCII. A header, one line per chunk id, one line per entry. Raw bytes in names are written as
Python's surrogate escapes. Everything that is not exactly this is refused; see docs/internals/image-format.md.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from cmdop_migrate.errors import ImageRefused

FORMAT = "cmdop-files"
VERSION = 1
REDIRECTED = 2  # version of a table with renamed directories; tools that read only 1 would lose their content
CHUNK = 1 << 20
MAX_DEPTH = 4096
MAX_SIZE = 1 << 53
# Range of mtimes: the seconds of the kernel. ext4 and xfs keep less, btrfs and tmpfs all of it.
EARLIEST, LATEST = -(1 << 63) * 10**9, (1 << 63) * 10**9 - 1

DIRECTORY, FILE, SYMLINK, FIFO, SOCKET = "d", "f", "l", "p", "s"
WHITEOUT, CHAR, BLOCK, HARDLINK = "w", "c", "b", "h"
LINKABLE = frozenset((FILE, SYMLINK, FIFO, SOCKET))

# Pseudo-devices that every session's own /dev has as well: such a node gives no access to the host.
HARMLESS = frozenset(((1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)))

_REF = re.compile(r"[0-9a-f]{16,128}")
_ACLS = ("system.posix_acl_access", "system.posix_acl_default")
_OVERLAY = "trusted.overlay."
REDIRECT = f"{_OVERLAY}redirect"  # on a renamed directory of the host, its name in the lower layer
# `overlay.` is how overlayfs stores the marks of an overlay nested inside the session: they are its data.
_OVERLAY_KEPT = ("opaque", "whiteout", "protattr", "redirect", "overlay.")
_OVERLAY_HOST_BOUND = ("origin", "impure", "nlink", "upper", "uuid")

Xattrs = tuple[tuple[str, bytes], ...]


class Extent(NamedTuple):
    """Locate `length` bytes of a file at `offset` in chunk number `chunk`, from `at` on."""

    offset: int
    length: int
    chunk: int
    at: int


class Entry(NamedTuple):
    """Describe one name in the tree. A tuple, not a dataclass: there may be hundreds of thousands of them.

    `extents` are the parts of a FILE that are not holes; `link` is the number of the entry that a HARDLINK is another
    name of (a HARDLINK has no metadata of its own).
    """

    kind: str
    depth: int
    name: bytes
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: Xattrs = ()
    size: int = 0
    extents: tuple[Extent, ...] = ()
    target: bytes = b""
    link: int = -1
    rdev: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class FileTable:
    """Describe a whole layer. `live`: captured while the session ran, good for finding changes, never for a restore."""

    entries: tuple[Entry, ...]
    chunks: tuple[str, ...]
    live: bool = False

    @property
    def data_bytes(self) -> int:
        """Return how many bytes a restore will write, to check the free disk space first."""
        return sum(part.length for entry in self.entries for part in entry.extents)

    @property
    def devices(self) -> tuple[bytes, ...]:
        """Return the paths of device nodes that give access to the host, so that a plan can name them."""
        return tuple(
            path for path, entry in self.paths() if entry.kind in (CHAR, BLOCK) and not harmless(entry.kind, entry.rdev)
        )

    def paths(self) -> Iterator[tuple[bytes, Entry]]:
        """Yield every entry with its path relative to the root of the layer (b"" is the root)."""
        parents: list[bytes] = []
        for entry in self.entries:
            del parents[entry.depth :]
            path = parents[-1] + entry.name if parents else b""
            yield path, entry
            if entry.kind == DIRECTORY:
                parents.append(path + b"/" if path else b"")

    def serialise(self) -> bytes:
        """Return the bytes that `parse` reads. The same tree gives the same bytes."""
        header = {
            "format": FORMAT,
            "version": REDIRECTED if any(map(is_redirected, self.entries)) else VERSION,
            "live": self.live,
            "chunks": len(self.chunks),
            "entries": len(self.entries),
        }
        encode = json.JSONEncoder(separators=(",", ":")).encode
        lines = [
            encode(header),
            *(encode(ref) for ref in self.chunks),
            *(encode(_row(entry)) for entry in self.entries),
        ]
        return ("\n".join(lines) + "\n").encode("ascii")


def harmless(kind: str, rdev: tuple[int, int]) -> bool:
    """Tell whether this device node may always be created."""
    return kind == CHAR and rdev in HARMLESS


def xattr_kept(name: str) -> bool | None:
    """Return True if this extended attribute of the upper layer travels, False if it stays behind, None if it must not
    exist at all.

    Overlayfs keeps its own notes there. Marks of what was hidden or renamed travel; notes about this host's lower files
    do not; what would make the layer depend on the data of lower files (metacopy, and any unknown note) is refused.
    Namespaces of one filesystem (btrfs., …) stay behind.
    """
    if not name.startswith(_OVERLAY):
        return name.startswith(("user.", "security.", "trusted.")) or name in _ACLS
    note = name.removeprefix(_OVERLAY)
    if note in _OVERLAY_KEPT[:-1] or note.startswith(_OVERLAY_KEPT[-1]):
        return True
    return False if note in _OVERLAY_HOST_BOUND else None


def is_redirected(entry: Entry) -> bool:
    """Tell whether this is a directory of the host that the session renamed."""
    return bool(entry.xattrs) and any(name == REDIRECT for name, _ in entry.xattrs)


def redirect_is_sound(value: bytes) -> bool:
    """Tell whether this names a directory of the same layer: one name, or an absolute path of plain names."""
    names = value[1:].split(b"/") if value.startswith(b"/") else [value]
    return not {b"", b".", b".."} & set(names) and b"/" not in names[0] and b"\0" not in value


def parse(data: bytes) -> FileTable:
    """Parse a table from an untrusted source. Raise ImageRefused, and nothing else, if anything in it is wrong."""
    lines = data.split(b"\n")
    if len(lines) < 2 or lines.pop():
        _refuse(0, "it is cut short")
    header = _load(0, lines[0])
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        _refuse(0, "it is not a file table")
    if header.get("version") not in (VERSION, REDIRECTED):
        raise ImageRefused(
            f"the file table has format version {header.get('version')!r}, this tool reads {VERSION} and {REDIRECTED}",
            "Restore it with the version of cmdop-migrate that made it, or a newer one.",
        )
    if set(header) != {"format", "version", "live", "chunks", "entries"} or type(header["live"]) is not bool:
        _refuse(0, "its header has other fields than this version knows")
    count = _int(0, header["chunks"], len(lines), "number of chunks")
    if _int(0, header["entries"], len(lines), "number of entries") + count + 1 != len(lines):
        _refuse(0, "it has more or fewer lines than its header says")
    chunks = []
    for number, line in enumerate(lines[1 : count + 1], 1):
        ref = _load(number, line)
        if not isinstance(ref, str) or not _REF.fullmatch(ref):
            _refuse(number, "not a chunk id")
        chunks.append(ref)
    entries = _entries(lines[count + 1 :], count)
    if any(map(is_redirected, entries)) != (header["version"] == REDIRECTED):
        _refuse(0, "its version does not fit what is in it")
    return FileTable(tuple(entries), tuple(chunks), header["live"])


def _entries(lines: list[bytes], chunks: int) -> list[Entry]:
    """Parse the entries and check the shape of the tree; `_entry` checks each line by itself."""
    entries: list[Entry] = []
    shared: dict[Xattrs, Xattrs] = {}
    last: list[bytes] = []  # last[n]: the latest name seen at depth n + 1 in the directories now open
    for number, line in enumerate(lines, chunks + 1):
        entry = _entry(number, _load(number, line), chunks)
        if not entries:
            if entry.depth or entry.name or entry.kind != DIRECTORY:
                _refuse(number, "the first entry is not the root directory")
        else:
            if not 1 <= entry.depth <= len(last):
                _refuse(number, "its parent is not a directory")
            del last[entry.depth :]
            if entry.name <= last[-1]:
                _refuse(number, "a name is empty, duplicate, or out of order")
            last[-1] = entry.name
        if entry.kind == DIRECTORY:
            last.append(b"")
        if entry.kind == HARDLINK and (entry.link >= len(entries) or entries[entry.link].kind not in LINKABLE):
            _refuse(number, "a hard link to something that is not an earlier file")
        if is_redirected(entry) and (entry.kind != DIRECTORY or not entry.depth):
            _refuse(number, "a redirect of an entry that is not a directory below the root")
        if entry.xattrs:
            entry = entry._replace(xattrs=shared.setdefault(entry.xattrs, entry.xattrs))
        entries.append(entry)
    if not entries:
        _refuse(0, "it has no root directory")
    return entries


def _entry(number: int, row: Any, chunks: int) -> Entry:
    if not isinstance(row, list) or len(row) < 4 or type(row[0]) is not str:
        _refuse(number, "not an entry")
    kind = row[0]
    depth = _int(number, row[1], MAX_DEPTH, "depth")
    name = _bytes(number, row[2], 255)
    if b"/" in name or name in (b".", b".."):
        _refuse(number, "a name that is a path")
    if kind == HARDLINK:
        if len(row) != 4:
            _refuse(number, "a hard link with other fields than its target")
        return Entry(HARDLINK, depth, name, link=_int(number, row[3], 1 << 40, "link"))
    extra = {DIRECTORY: 0, FILE: 2, SYMLINK: 1, FIFO: 0, SOCKET: 0, WHITEOUT: 0, CHAR: 2, BLOCK: 2}.get(kind)
    if extra is None or len(row) != 8 + extra:
        _refuse(number, "unknown kind of entry, or wrong number of fields")
    entry = Entry(
        kind,
        depth,
        name,
        _int(number, row[3], 0o7777, "mode"),
        _int(number, row[4], (1 << 32) - 2, "uid"),
        _int(number, row[5], (1 << 32) - 2, "gid"),
        _int(number, row[6], LATEST, "mtime", least=EARLIEST),
        _xattrs(number, row[7]),
    )
    if kind == FILE:
        size = _int(number, row[8], MAX_SIZE, "size")
        return entry._replace(size=size, extents=_extents(number, row[9], size, chunks))
    if kind == SYMLINK:
        target = _bytes(number, row[8], 4095)
        return entry._replace(target=target) if target else _refuse(number, "a symlink to nothing")
    if kind in (CHAR, BLOCK):
        rdev = _int(number, row[8], (1 << 12) - 1, "major"), _int(number, row[9], (1 << 20) - 1, "minor")
        if kind == CHAR and rdev == (0, 0):
            _refuse(number, "a whiteout written as a device")
        return entry._replace(rdev=rdev)
    return entry


def _extents(number: int, row: Any, size: int, chunks: int) -> tuple[Extent, ...]:
    if not isinstance(row, list) or len(row) % 4:
        _refuse(number, "extents that are not a list of fours")
    extents = []
    end = 0
    for index in range(0, len(row), 4):
        offset = _int(number, row[index], size, "offset", least=end)
        length = _int(number, row[index + 1], min(CHUNK, size - offset), "length", least=1)
        chunk = _int(number, row[index + 2], chunks - 1, "chunk")
        extents.append(
            Extent(offset, length, chunk, _int(number, row[index + 3], CHUNK - length, "place in the chunk"))
        )
        end = offset + length
    return tuple(extents)


def _xattrs(number: int, row: Any) -> Xattrs:
    if not isinstance(row, list) or len(row) % 2:
        _refuse(number, "extended attributes that are not a list of pairs")
    xattrs: list[tuple[str, bytes]] = []
    for name, text in zip(row[::2], row[1::2], strict=True):
        raw = _bytes(number, name, 255)
        if not xattr_kept(name) or (xattrs and name <= xattrs[-1][0]) or not isinstance(text, str):
            _refuse(number, f"extended attribute {name!r} is not allowed, duplicate, or out of order")
        try:
            value = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            _refuse(number, "an extended attribute that is not base64")
        if len(value) > 1 << 16:
            _refuse(number, "an extended attribute that is too long")
        if name == REDIRECT and not redirect_is_sound(value):
            _refuse(number, "a directory redirected to an invalid name")
        xattrs.append((raw.decode("utf-8", "surrogateescape"), value))
    return tuple(xattrs)


def _row(entry: Entry) -> list[Any]:
    name = _text(entry.name)
    if entry.kind == HARDLINK:
        return [HARDLINK, entry.depth, name, entry.link]
    xattrs = [part for key, value in entry.xattrs for part in (key, base64.b64encode(value).decode())]
    row: list[Any] = [entry.kind, entry.depth, name, entry.mode, entry.uid, entry.gid, entry.mtime_ns, xattrs]
    if entry.kind == FILE:
        row += [entry.size, [part for extent in entry.extents for part in extent]]
    elif entry.kind == SYMLINK:
        row.append(_text(entry.target))
    elif entry.kind in (CHAR, BLOCK):
        row += entry.rdev
    return row


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _load(number: int, line: bytes) -> Any:
    try:
        return json.loads(line.decode("ascii"))
    except (ValueError, RecursionError):
        _refuse(number, "not JSON")


def _int(number: int, value: Any, most: int, what: str, least: int = 0) -> int:
    # `type is`: JSON's true would pass as the integer 1.
    if type(value) is not int or not least <= value <= most:
        _refuse(number, f"{what} is out of range")
    return value


def _bytes(number: int, value: Any, most: int) -> bytes:
    try:
        raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else b"\0"
    except UnicodeEncodeError:
        raw = b"\0"
    if b"\0" in raw or len(raw) > most:
        _refuse(number, "a name that no file can have")
    return raw


def _refuse(number: int, why: str) -> NoReturn:
    raise ImageRefused(
        f"the file table is damaged at line {number + 1}: {why}",
        "Restore an older checkpoint: `cmdop-migrate checkpoints ls`. Nothing was started from this one.",
    )
