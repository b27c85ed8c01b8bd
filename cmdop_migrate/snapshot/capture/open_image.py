"""Open a checkpoint's image in a thread while CRIU starts, so that no request to the store waits until the freeze."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.config import Config
from cmdop_migrate.host import resources
from cmdop_migrate.images.write.writer import ImageWriter, WriterOptions
from cmdop_migrate.model import Record
from cmdop_migrate.session.files_in_use import Touched
from cmdop_migrate.snapshot import host_files
from cmdop_migrate.util import threads

ABORT_TIMEOUT = 5.0  # seconds for removing the upload mark after Ctrl-C
PendingImage = Future[tuple[ImageWriter, host_files.HostFileCollector]]
_log = log.get("checkpoint")


def start(
    config: Config,
    record: Record,
    directory: Path,
    files: Touched,
    carry: host_files.Carry,
    leave_running: bool,
    on_pack: Callable[[str], None] | None,
) -> PendingImage:
    """Start to open the image. With `leave_running` the frozen time counts, so the writer spills to disk; a session
    that is parked or moved waits for the whole upload anyway."""

    def open_image() -> tuple[ImageWriter, host_files.HostFileCollector]:
        ring, store = resources.open_keys(config), resources.open_store(config)
        spill = config.state_dir / "spill"
        spill.mkdir(mode=0o700, exist_ok=True)
        is_remote = not config.store.startswith("file:")  # writing to a file store costs the same as spilling
        writer = ImageWriter(
            store, ring, record.session, spill, record.checkpoint,
            WriterOptions(
                hold=leave_running and is_remote, defer=leave_running, fingerprints=directory / "memory.groups",
                index_caches=config.state_dir / "ledgers",
            ),
            on_pack,
        )  # fmt: skip
        try:
            writer.begin()
            key = ring.current.fingerprint
            collector = host_files.HostFileCollector(config.state_dir, writer, key, carry, wait=leave_running)
            collector.add(files)
        except BaseException:
            writer.abort()
            raise
        return writer, collector

    return threads.start(open_image, "open")


def abort(pending_image: PendingImage, error: BaseException) -> None:
    """Abort the upload after `error`. After Ctrl-C a store that hangs is waited for ABORT_TIMEOUT only; the upload mark
    left behind then expires, as after a crash."""

    def abort_writer() -> None:
        if pending_image.exception() is None:
            pending_image.result()[0].abort()

    aborted = threads.start(abort_writer, "abort")
    futures.wait([aborted], None if isinstance(error, Exception) else ABORT_TIMEOUT)
    if aborted.done() and (failure := aborted.exception()) is not None:
        _log.error("aborting the upload failed", exc_info=failure)
