"""Describe files of the host's root that a session has mapped or open, and tell whether they are the same here.

CRIU opens them again by path on restore, and a library that differs in one byte is a crash later. Digests cost time, so
they are cached between checkpoints and can be computed before the session is frozen.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from cmdop_migrate import log
from cmdop_migrate.clock import walltime
from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.files.stat_cache import TICK_NS

_FORMAT = "cmdop-host-files-1"
_BLOCK = 1 << 20
_ELF = b"\x7fELF"
_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3
# Missing, or a socket or a device without a driver: nothing to compare.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV)
_REMEMBERED = 20_000
# Surrogates that encode no raw byte: such a path could not be opened.
_LONE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_HEX = re.compile(r"([0-9a-f]{2}){1,64}")
_logger = log.get("images.host_files")


class Hasher(Protocol):
    """Abstract over what hashlib, hmac and blake3 all offer."""

    def update(self, data: bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class HostFile:
    """Describe one file as a session saw it. `path` is absolute inside the session's root; raw bytes are surrogate
    escapes."""

    path: str
    size: int
    mtime_ns: int
    build_id: str | None
    digest: str | None

    def as_json(self) -> list[Any]:
        """Return the row for the manifest."""
        return [self.path, self.size, self.mtime_ns, self.build_id, self.digest]

    @classmethod
    def from_json(cls, row: object) -> HostFile:
        """Parse a row strictly. Raise ImageRefused for anything that `as_json` does not write."""
        match row:
            case [str(path), int(size), int(mtime_ns), str() | None as build_id, str() | None as digest]:
                sound = is_sound(path)
                hexes = all(text is None or _HEX.fullmatch(text) for text in (build_id, digest))
                if sound and hexes and not isinstance(size, bool) and not isinstance(mtime_ns, bool) and size >= 0:
                    return cls(path, size, mtime_ns, build_id, digest)
        raise ImageRefused(
            "the list of host files in the image is damaged",
            "Restore an older checkpoint: `cmdop-migrate checkpoints ls`.",
        )


def is_sound(path: str) -> bool:
    """Tell whether this is an absolute path of plain names that can be opened."""
    names = path.split("/")
    plain = names[0] == "" and len(names) > 1 and not {"", ".", ".."} & set(names[1:])
    return plain and "\0" not in path and not _LONE.search(path)


class FileMatch(StrEnum):
    """Name how a recorded file compares with the file on this host."""

    SAME = "same"
    GROWN = "grown"  # the same content with more appended, such as a log
    MISSING = "missing"
    DIFFERENT = "different"


def compare(
    recorded: Iterable[HostFile],
    here: Callable[[str], HostFile | None],
    begins: Callable[[HostFile], bool] = lambda _: False,
) -> list[tuple[str, FileMatch]]:
    """Compare each recorded file with `here(path)`. Files are the same if the size is equal and the digest is equal, or
    the build-id where a digest is lacking. `begins` tells whether a larger file begins with the recorded content."""
    verdicts = []
    for then in recorded:
        now = here(then.path)
        if now is None:
            verdicts.append((then.path, FileMatch.MISSING))
        else:
            verdicts.append((then.path, _verdict(then, now, begins)))
    return verdicts


def _verdict(then: HostFile, now: HostFile, begins: Callable[[HostFile], bool]) -> FileMatch:
    if _same(then, now):
        return FileMatch.SAME
    return FileMatch.GROWN if now.size > then.size and begins(then) else FileMatch.DIFFERENT


def _same(then: HostFile, now: HostFile) -> bool:
    if then.size != now.size:
        return False
    if then.digest is not None and now.digest is not None:
        return then.digest == now.digest
    return then.build_id is not None and then.build_id == now.build_id


class HostFiles:
    """Describe files, caching digests in a local file across runs.

    `hasher` makes a fresh hash; `scheme` names it and its key, so that a cache made under another key is dropped. Use
    from one thread at a time.
    """

    def __init__(self, cache: Path, hasher: Callable[[], Hasher], scheme: str) -> None:
        self._cache = cache
        self._hasher = hasher
        self._scheme = scheme
        self._known: dict[str, tuple[str | None, str]] = {}
        self.hashed = 0
        self._load()

    def describe(self, path: str, place: str | bytes | int | None = None) -> HostFile | None:
        """Describe the file at `path`, or at `place` (a path such as /proc/PID/map_files/…, or an open descriptor)
        under the name `path`. Return None if it is missing or not a regular file."""
        if isinstance(place, int):
            return self._describe(path, place)
        try:
            fd = os.open(path if place is None else place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if error.errno in _NO_FILE:
                return None
            raise
        try:
            return self._describe(path, fd)
        finally:
            os.close(fd)

    def begins(self, then: HostFile) -> bool:
        """Tell whether the file at its path begins with the recorded content. Always False for a program or library."""
        if then.digest is None or then.build_id is not None:
            return False
        try:
            with open(then.path, "rb") as file:
                return self._digest(file.fileno(), then.size) == (then.digest, then.size)
        except FileNotFoundError:
            return False  # rotated meanwhile

    def save(self) -> None:
        """Write the cache atomically; drop the least recently used entries when it grows too large. A failure is
        logged: the next run only takes longer."""
        rows = dict(list(self._known.items())[-_REMEMBERED:])
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=self._cache.parent, prefix=self._cache.name)
            try:
                with open(fd, "w", encoding="ascii") as file:
                    json.dump({"format": _FORMAT, "scheme": self._scheme, "files": rows}, file)
                os.replace(name, self._cache)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            _logger.warning("cannot save the digests of host files: %s", error)

    def _describe(self, path: str, fd: int) -> HostFile | None:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return None
        key = _key(info)
        known = self._known.pop(key, None)
        if known is None:
            build_id, (digest, size) = read_build_id(fd, info.st_size), self._digest(fd)
            after = os.fstat(fd)
            if _key(after) != key or info.st_ctime_ns > int(walltime() * 1e9) - TICK_NS:
                # Describe it as it was read: it may be longer by now.
                return HostFile(path, size, after.st_mtime_ns, build_id, digest)
            known = build_id, digest
        self._known[key] = known  # at the end: most recently used
        return HostFile(path, info.st_size, info.st_mtime_ns, *known)

    def _digest(self, fd: int, most: int | None = None) -> tuple[str, int]:
        """Return the digest of the file, or of its first `most` bytes, and the number of bytes digested."""
        self.hashed += 1
        hasher = self._hasher()
        offset = 0
        while data := os.pread(fd, _BLOCK if most is None else min(_BLOCK, most - offset), offset):
            hasher.update(data)
            offset += len(data)
        return hasher.hexdigest(), offset

    def _load(self) -> None:
        try:
            cache = json.loads(self._cache.read_bytes())
        except (OSError, ValueError, RecursionError):
            return  # a lost cache costs only time
        if not isinstance(cache, dict) or cache.get("format") != _FORMAT or cache.get("scheme") != self._scheme:
            return
        rows = cache.get("files")
        for key, value in rows.items() if isinstance(rows, dict) else ():
            match value:
                case [str() | None as build_id, str(digest)]:
                    self._known[key] = build_id, digest


def _key(info: os.stat_result) -> str:
    return f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}"


def is_code(path: str) -> bool:
    """Tell whether the file is a program or a library (ELF). Those of Go, for one, have no build-id."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_ELF)) == _ELF


def read_build_id(fd: int, size: int) -> str | None:
    """Return the GNU build-id of an ELF file in hex; None for any other file, or a damaged ELF, or one without."""
    head = os.pread(fd, 64, 0)
    if len(head) < 52 or head[:4] != _ELF or head[4] not in (1, 2) or head[5] not in (1, 2):
        return None
    wide, order = head[4] == 2, "<" if head[5] == 1 else ">"
    try:
        (start,) = struct.unpack_from(order + ("Q" if wide else "I"), head, 32 if wide else 28)
        step, count = struct.unpack_from(order + "HH", head, 54 if wide else 42)
        for index in range(count):
            part = os.pread(fd, step, _within(start + index * step, size))
            (kind,) = struct.unpack_from(order + "I", part)
            if kind != _PT_NOTE:
                continue
            offset, length = (
                (struct.unpack_from(order + "Q", part, at)[0] for at in (8, 32))
                if wide
                else (struct.unpack_from(order + "I", part, at)[0] for at in (4, 16))
            )
            build_id = _note(os.pread(fd, min(length, 1 << 16), _within(offset, size)), order)
            if build_id is not None:
                return build_id
    except struct.error:
        return None
    return None


def _within(offset: int, size: int) -> int:
    if offset >= size:
        raise struct.error("points past the end of the file")
    return offset


def _note(data: bytes, order: str) -> str | None:
    """Find the build-id in a note section. A note is three words (length of name, length of content, type), name,
    content; both padded to four bytes."""
    at = 0
    while at + 12 <= len(data):
        name_size, size, kind = struct.unpack_from(order + "III", data, at)
        name = at + 12
        content = name + (name_size + 3) // 4 * 4
        if kind == _NT_GNU_BUILD_ID and data[name : name + name_size] == b"GNU\0" and 0 < size <= 64:
            build_id = data[content : content + size]
            return build_id.hex() if len(build_id) == size else None
        at = content + (size + 3) // 4 * 4
    return None
