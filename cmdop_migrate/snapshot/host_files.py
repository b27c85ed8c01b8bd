"""Handle the files of the host that a session maps or has open.

A checkpoint describes them, and carries the content of those that another host may lack; a restore compares them with
the files of its host, and installs the carried ones that differ or are missing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cmdop_migrate import log
from cmdop_migrate.criu.image import files_image
from cmdop_migrate.errors import Blocked, ImageRefused
from cmdop_migrate.images.files.host_files import FileMatch, HostFile, HostFiles, compare, is_code, is_sound
from cmdop_migrate.images.format.layout import ID_BYTES, MAX_CHUNK
from cmdop_migrate.images.read.reader import Image
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.session import overlay_redirects
from cmdop_migrate.session.files_in_use import Touched
from cmdop_migrate.util import atomic
from cmdop_migrate.util.digest import blake3
from cmdop_migrate.util.paths import is_under

Carry = Literal["none", "mapped", "opened"]
BLOB = "hostfiles"
_ID = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")
_log = log.get("carry")


@dataclass(frozen=True)
class CarriedContent:
    """Describe the content of a file that is in the image."""

    mode: int
    uid: int
    gid: int
    chunks: tuple[str, ...]


class HostFileCollector:
    """Make the image's list of host files. Digests and chunk names are cached: most of these files are libraries."""

    def __init__(self, state_dir: Path, writer: ImageWriter, key: str, carry: Carry, wait: bool = True) -> None:
        """Carry the files that `carry` names, and describe the others. With `wait`, the files are sealed when `add`
        returns, so that a later freeze does not wait for them. Without, `finish` waits: they are sealed in parallel
        with CRIU."""
        self._writer, self._carry, self._wait = writer, carry, wait
        self._known = HostFiles(state_dir / "cache" / "hostfiles.json", blake3, "blake3")
        self._chunks_file = state_dir / "cache" / f"carried-{key}.json"
        self._chunks: dict[str, list[str]] = _load(self._chunks_file)
        self._rows: dict[str, tuple[HostFile, CarriedContent | None]] = {}
        self._sent: dict[str, list[Future[str]]] = {}  # chunks being sealed, by path
        self._last = Touched()

    def add(self, files: Touched) -> None:
        """Describe the files in use, and carry those that are to be carried. The list has the files added last."""
        self._last = files
        self._add_paths(files.mapped, self._carry != "none")
        self._add_paths(files.opened, self._carry == "opened")
        if self._wait:
            self._wait_sent()

    def _add_paths(self, paths: Iterable[str], carry: bool) -> None:
        for path in sorted(paths):
            known = self._rows.get(path)
            if path in self._sent or (known is not None and (known[1] is not None or not carry)):
                continue
            described = self._known.describe(path)
            if described is not None:
                self._rows[path] = described, None
                if carry:
                    self._sent[path] = self._send(path, described)

    def _wait_sent(self) -> None:
        for path, futures in self._sent.items():  # waited for together: several are digested and compressed in parallel
            self._carried(path, tuple(future.result() for future in futures))
        self._sent.clear()

    def _send(self, path: str, described: HostFile) -> list[Future[str]]:
        """Send a file's chunks to the writer, and return their names. A file whose chunks the store has is not read."""
        stored = self._chunks.get(described.digest or "", [])
        if stored and all(self._writer.refer(ref) for ref in stored):
            return [_done(ref) for ref in stored]
        read, size, sent = blake3(), 0, []
        with open(path, "rb") as file:
            while piece := file.read(MAX_CHUNK):
                read.update(piece)
                size += len(piece)
                sent.append(self._writer.submit_named(piece, ahead=True))
        if (size, read.hexdigest()) != (described.size, described.digest):
            # A process writes to the file: what was read now is carried, and must not pass for what was described.
            self._rows[path] = replace(described, size=size, build_id=None, digest=read.hexdigest()), None
        return sent

    def _carried(self, path: str, chunks: tuple[str, ...]) -> None:
        described, info = self._rows[path][0], os.stat(path)
        if described.digest:
            self._chunks[described.digest] = list(chunks)
        self._rows[path] = described, CarriedContent(info.st_mode & 0o7777, info.st_uid, info.st_gid, chunks)

    def finish(self) -> None:
        """Add the list to the image, and save the caches."""
        self._wait_sent()
        in_use, renamed = self._last.mapped | self._last.opened, self._last.renamed
        rows = [
            [described.as_json(), _row(carried), *([renamed[path]] if path in renamed else [])]
            for path, (described, carried) in self._rows.items()
            if path in in_use
        ]
        self._writer.add_blob(BLOB, json.dumps(rows).encode())
        self._known.save()
        try:
            self._chunks_file.parent.mkdir(mode=0o700, exist_ok=True)
            atomic.replace(str(self._chunks_file), json.dumps(self._chunks).encode(), durable=False)
        except OSError as error:  # the session is frozen, and this cache only saves the next checkpoint some work
            _log.warning("the cache of carried files cannot be written, they will be read again: %s", error)


@dataclass(frozen=True)
class HostFileEntry:
    """Describe a host file that a session has in use. `shown` is its path in the session: another than the host's if
    the session renamed a directory above it."""

    file: HostFile
    carried: CarriedContent | None
    shown: str


@dataclass(frozen=True)
class InstalledFiles:
    """List the host files of a restored session that are not the same as at the checkpoint: `carried` came from the
    image, `grown` are unchanged but longer, `accepted` differ or are missing and were accepted by --accept-files."""

    carried: list[str] = field(default_factory=list)
    grown: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)

    @property
    def accepted_files(self) -> list[str]:
        """Return the files that CRIU must open as they are on this host."""
        return self.grown + self.accepted


def install(
    image: Image, state_dir: Path, points: list[str], uppers: list[Path], accept: bool = False
) -> InstalledFiles:
    """Install the files that differ or are missing on this host into the session's own layer.

    Raises Blocked, before anything runs, if one of them was not carried; with `accept`, only if it is a program or a
    library: other files are opened as they are, or empty if they are missing.
    """
    rows = parse(image.blob(BLOB))
    known = HostFiles(state_dir / "cache" / "hostfiles.json", blake3, "blake3")
    verdicts = dict(compare((row.file for row in rows), known.describe, known.begins))
    known.save()
    different = [row for row in rows if verdicts[row.file.path] is not FileMatch.SAME]
    needed = [row for row in different if not _in_upper(row.shown, points, uppers)]
    grown = [row for row in needed if verdicts[row.file.path] is FileMatch.GROWN and row.carried is None]
    needed = [row for row in needed if row not in grown]
    missing = [row for row in needed if row.carried is None]
    code = _code(image, missing) if accept else {row.shown for row in missing}
    accepted = [row for row in missing if row.shown not in code]
    if refused := [row.file.path for row in missing if row.shown in code]:
        some = ", ".join(refused[:5]) + (f" and {len(refused) - 5} more" if len(refused) > 5 else "")
        hint = (
            "Install the same packages here, or checkpoint with --carry opened; or take data as it is: --accept-files."
        )
        raise Blocked(f"files the session needs are missing or different on this host: {some}", hint)
    for row in needed:
        if row.carried is not None:
            _place(image, row, row.file.size, row.carried, points, uppers)
        elif verdicts[row.file.path] is FileMatch.MISSING:
            _place(image, row, 0, CarriedContent(0o644, 0, 0, ()), points, uppers)
    return InstalledFiles(
        [row.shown for row in needed if row not in accepted],
        [row.shown for row in grown],
        [row.shown for row in accepted],
    )


def _code(image: Image, rows: Iterable[HostFileEntry]) -> set[str]:
    """Return those of the files that are programs or libraries, by their path in the session: a process that maps them
    works with no other version. They are known by their build-id; without one, by the file that is at their path here,
    or, if it is missing, by their mode in the image."""
    name = f"criu/{files_image.NAME}"
    run = files_image.executables(image.blob(name)) if name in image.manifest.blobs else set()
    return {
        row.shown
        for row in rows
        if row.file.build_id is not None
        or is_code(row.file.path)
        or (os.fsencode(row.shown) in run and not os.path.isfile(row.file.path))
    }


def parse(blob: bytes) -> list[HostFileEntry]:
    """Parse the image's list of host files. Raises ImageRefused for anything `HostFileCollector` does not write."""
    try:
        rows = json.loads(blob)
        if not isinstance(rows, list):
            raise ValueError("no list")
        return [_held(*row) for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise ImageRefused(
            f"the image's list of host files is damaged: {error}", "Restore an older checkpoint."
        ) from error


def _held(row: Any, carried: Any, shown: str | None = None) -> HostFileEntry:
    file = HostFile.from_json(row)
    if shown is not None and not (isinstance(shown, str) and is_sound(shown)):
        raise ValueError("bad path")
    return HostFileEntry(file, _carried(carried), file.path if shown is None else shown)


def _done(ref: str) -> Future[str]:
    done: Future[str] = Future()
    done.set_result(ref)
    return done


def _row(carried: CarriedContent | None) -> list[Any] | None:
    return None if carried is None else [carried.mode, carried.uid, carried.gid, list(carried.chunks)]


def _carried(row: Any) -> CarriedContent | None:
    if row is None:
        return None
    mode, uid, gid, chunks = row
    if not all(isinstance(number, int) and 0 <= number < 1 << 32 for number in (mode, uid, gid)) or mode > 0o7777:
        raise ValueError("bad mode or owner")
    return CarriedContent(mode, uid, gid, tuple(str(ref) for ref in chunks))


def _layer(path: str, points: list[str]) -> int:
    best = max((point for point in points if is_under(path, point)), key=len)
    return points.index(best)


def _upper_path(path: str, points: list[str], uppers: list[Path]) -> Path:
    number = _layer(path, points)
    return uppers[number] / os.path.relpath(path, points[number])


def _in_upper(path: str, points: list[str], uppers: list[Path]) -> bool:
    return os.path.lexists(_upper_path(path, points, uppers))


def _place(
    image: Image, row: HostFileEntry, size: int, carried: CarriedContent, points: list[str], uppers: list[Path]
) -> None:
    """Write a file into the upper layer, under the name the session has for it."""
    number = _layer(row.shown, points)
    target = _upper_path(row.shown, points, uppers)
    lower = overlay_redirects.LowerNames(uppers[number])
    here, inside = uppers[number], ""
    for part in Path(os.path.relpath(os.path.dirname(row.shown), points[number])).parts:
        here, inside = here / part, os.path.join(inside, part)
        if here.is_symlink() or (here.exists() and not here.is_dir()):
            raise ImageRefused(
                f"{row.shown} cannot be installed: {os.path.join(points[number], inside)} is no directory in the"
                " session"
            )
        if not here.exists():
            here.mkdir(mode=0o755)
            there = os.path.join(points[number], lower.find(inside))
            if os.path.isdir(there):
                info = os.stat(there)
                os.chown(here, info.st_uid, info.st_gid)
                os.chmod(here, info.st_mode & 0o7777)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        for ref in carried.chunks:
            file.write(image.read(ref))
        file.flush()
        if os.fstat(fd).st_size != size:
            raise ImageRefused(f"the image's copy of {row.file.path} is incomplete", "Restore an older checkpoint.")
        os.fchown(fd, carried.uid, carried.gid)
        os.fchmod(fd, carried.mode)
        os.utime(fd, ns=(row.file.mtime_ns, row.file.mtime_ns))


def _load(path: Path) -> dict[str, list[str]]:
    try:
        held = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: refs for key, refs in held.items() if _are_ids(refs)} if isinstance(held, dict) else {}


def _are_ids(refs: object) -> bool:
    return isinstance(refs, list) and all(isinstance(ref, str) and _ID.fullmatch(ref) for ref in refs)
