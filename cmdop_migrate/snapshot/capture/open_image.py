"""A checkpoint's image is begun beside CRIU's start: all that is to be had from the store before the freeze."""

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

LAST_WORD = 5.0  # seconds that a store has to hear that nothing more comes
Opening = Future[tuple[ImageWriter, host_files.Carrier]]
_log = log.get("checkpoint")


def start(
    config: Config,
    record: Record,
    directory: Path,
    found: Touched,
    what: host_files.Carry,
    goes_on: bool,
    on_pack: Callable[[str], None] | None,
) -> Opening:
    """`goes_on`: else it is parked, or moved, and waits for all of it anyway."""

    def open_image() -> tuple[ImageWriter, host_files.Carrier]:
        ring, store = resources.open_keys(config), resources.open_store(config)
        spill = config.state_dir / "spill"
        spill.mkdir(mode=0o700, exist_ok=True)
        is_far = not config.store.startswith("file:")  # to a file it is the same work as keeping it on disk
        writer = ImageWriter(
            store, ring, record.session, spill, record.checkpoint,
            WriterOptions(
                hold=goes_on and is_far, defer=goes_on, fingerprints=directory / "memory.groups",
                index_caches=config.state_dir / "ledgers",
            ),
            on_pack,
        )  # fmt: skip
        try:
            writer.begin()
            carrier = host_files.Carrier(config.state_dir, writer, ring.current.fingerprint, what, wait=goes_on)
            carrier.add(found)
        except BaseException:
            writer.abort()
            raise
        return writer, carrier

    return threads.start(open_image, "open")


def give_up(opening: Opening, error: BaseException) -> None:
    """The store hears of it. Whoever pressed Ctrl-C does not wait for one that hangs: what it has not heard in time it
    finds out by itself, as after a crash."""

    def tell() -> None:
        if opening.exception() is None:
            opening.result()[0].abort()

    ended = threads.start(tell, "give-up")
    futures.wait([ended], None if isinstance(error, Exception) else LAST_WORD)
    if ended.done() and (failure := ended.exception()) is not None:
        _log.error("giving up failed", exc_info=failure)
