"""Capture the files a session changed into its image: each overlay's upper layer, while the session is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.errors import CmdopError
from cmdop_migrate.images.files import capture as files_capture
from cmdop_migrate.images.files import file_table, stat_cache
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.session.files_in_use import Touched

_log = log.get("filecapture")


class _Sink:
    def __init__(self, writer: ImageWriter) -> None:
        self.submit = writer.submit_named


def capture(writer: ImageWriter, directory: Path, uppers: Sequence[Path], files: Touched) -> list[bytes]:
    """Store the files of each layer; return the layers' tables, serialised. Files that did not change since the last
    capture on this host are not read again, so a second capture during one freeze costs a walk."""
    sink, tables = _Sink(writer), []
    for number, upper in enumerate(uppers):
        mapped = frozenset(path for layer, path in files.written if layer == number)
        cache = directory / f"files-{number}"
        captured = files_capture.capture(upper, sink, previous=_previous(cache), mapped=mapped, present=writer.has)
        if not _all_there(writer, captured):
            # It was there when the capture began: entries of the index cache may be dropped at any time (index_cache).
            _log.info("chunks of %s are no longer in the index cache: all its files are read again", upper)
            captured = files_capture.capture(upper, sink, mapped=mapped)
        table = captured.table.serialise()
        tables.append(table)
        _keep(cache, table, stat_cache.serialise(captured.table, captured.stats))
    return tables


def add(writer: ImageWriter, tables: Sequence[bytes]) -> None:
    """Put the tables that `capture` returned into the image."""
    for number, table in enumerate(tables):
        writer.add_blob(f"files/{number}", table)


def _all_there(writer: ImageWriter, captured: files_capture.Capture) -> bool:
    """Refer to every chunk of the table from the image. Return False if one is neither in the store nor sent."""
    return all(writer.refer(ref) for ref in captured.table.chunks)


def _keep(cache: Path, table: bytes, stats: bytes) -> None:
    """Save the table and stats for the next capture, which takes longer without them."""
    try:
        cache.with_suffix(".table").write_bytes(table)
        cache.with_suffix(".stats").write_bytes(stats)
    except OSError as error:
        _log.warning("the file cache cannot be written, the next checkpoint reads all files again: %s", error)


def _previous(cache: Path) -> files_capture.Capture | None:
    """Return what the last capture on this host saved, None if it is missing or damaged."""
    try:
        table = file_table.parse(cache.with_suffix(".table").read_bytes())
        stats = stat_cache.parse(cache.with_suffix(".stats").read_bytes(), table)
    except (OSError, CmdopError):
        return None
    return None if stats is None else files_capture.Capture(table, stats)
