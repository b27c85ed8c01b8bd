"""Make a checkpoint: bytes in, packs out, the manifest last.

begin    mark the upload, then learn what the store already has
feed, submit, add_blob            from here on nothing waits for the store
end_input                         all input is in our memory; the session may go on
finish_input                      all input is digested and sealed, at the store's pace
finish                            wait for the store: it has all but the manifest, which says what to read back
publish                           put the manifest: the commit point
abort                             leave what was uploaded usable for the next try
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmdop_migrate import log
from cmdop_migrate.clock import walltime
from cmdop_migrate.errors import CheckpointNotFound, CmdopError, ImageRefused, StoreUnreachable, Unreachable
from cmdop_migrate.images.format import layout, manifest
from cmdop_migrate.images.format.chunk_table import ChunkTable, Place, encode
from cmdop_migrate.images.format.codec import Buffer
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.manifest import Blob, Direct, Manifest
from cmdop_migrate.images.format.seal import Sealer
from cmdop_migrate.images.format.windows import PageTable, table_of
from cmdop_migrate.images.read.load_table import load_table
from cmdop_migrate.images.store import catalog, deletion_marks, index, index_cache
from cmdop_migrate.images.store.index_cache import Ledger
from cmdop_migrate.images.store.upload_marks import STALE_AFTER, UploadMark
from cmdop_migrate.images.write import page_buffers
from cmdop_migrate.images.write.fingerprints import Groups
from cmdop_migrate.images.write.page_buffers import PageFeed
from cmdop_migrate.images.write.pipeline import Pipeline
from cmdop_migrate.images.write.previous_round import Earlier, Kept
from cmdop_migrate.images.write.upload_queue import BUFFERS, UPLOADERS, Spool
from cmdop_migrate.storage.base import Store
from cmdop_migrate.util import threads

_FIRST_INDEX = 8  # packs stored before the first index of an unfinished upload
_logger = log.get("images.writer")


@dataclass(frozen=True)
class Tuning:
    """Memory and threads. Peak memory is about `buffers` MiB of input + pack_buffers and uploaders times 8 MiB."""

    workers: int | None = None
    buffers: int = page_buffers.BUFFERS
    uploaders: int = UPLOADERS
    pack_buffers: int = BUFFERS
    patience: float = index.PATIENCE
    stale_after: float = STALE_AFTER


class ImageWriter:
    """One checkpoint of one session. Pages are fed from one thread; `submit` and `add_blob` may come from any."""

    def __init__(
        self,
        store: Store,
        ring: KeyRing,
        session: str,
        spill_dir: Path,
        parent: str | None = None,
        tuning: Tuning | None = None,
        on_pack: Callable[[str], None] | None = None,
        hold: bool = False,
        put_off: bool = False,
        hints: Path | None = None,
        ledgers: Path | None = None,
    ) -> None:
        """`on_pack` is called, from any thread, with the id of each pack that the store has from now on. Until
        `end_input` the machine may be left to whoever gives input: with `hold` nothing is sent; with `put_off` memory
        waits on disk as it came, but for what is as it was in the parent: to find that out is less work than to write
        it down. `hints` is a file of the session's by which that is seen, `ledgers` a directory for what this host has
        learnt of stores."""
        self.session = layout.checked_id(session, "session id")
        self.checkpoint = layout.new_id()
        self.parent = parent
        self._store, self._ring, self._spill_dir = store, ring, spill_dir
        self._tuning = tuning = tuning or Tuning()
        self._key = ring.current
        self._sealer = Sealer(self._key)
        self._mark = UploadMark(store, session, self.checkpoint, tuning.stale_after)
        self._blobs: dict[str, tuple[int, list[Future[int]]]] = {}
        self._blob_bytes = 0
        self._on_pack = on_pack
        self._hold, self._put_off = hold, put_off
        self._hints, self._ledgers = hints, ledgers
        self._ledger: Ledger | None = None
        self._groups = Groups(self._sealer) if hints is not None else None
        self._uploaded: list[tuple[str, list[int]]] = []
        self._next_index = _FIRST_INDEX
        self._index_lock = threading.Lock()
        self._spool: Spool | None = None
        self._pipeline: Pipeline | None = None
        self._feed: PageFeed | None = None
        self._tables: dict[str, PageTable] = {}

    def begin(self) -> None:
        """Mark the upload, then read what is doomed, then what exists: this order is the protocol (retention.py).
        Takes a moment on a large store, so call it before the freeze."""
        with ThreadPoolExecutor(1, "parent") as pool:
            parent = pool.submit(self._parent_table)  # what it names counts only where it is usable
            self._mark.begin()
            doomed = deletion_marks.doomed_packs(self._store)
            usable = index.usable_packs(self._store, doomed)
            first = parent.result() if usable else {}
        self._ledger = Ledger(
            self._key, self._ledgers and index_cache.path_of(self._ledgers, self._store.url, self._key)
        )
        known = index.load_known(self._store, self._ring, usable, self._ledger, first, self._tuning.patience)
        self._spool = Spool(
            self._store, self._spill_dir, self._on_stored, self._tuning.pack_buffers, self._tuning.uploaders
        )
        if first and self._hints is not None and self._groups is not None and self.parent is not None:
            self._groups.load(self._hints, self.parent)  # of no use in a store that lacks what they lead to
        self._pipeline = Pipeline(self._sealer, known, self._spool, self._tuning.workers, self._groups)
        if self._hold:
            self._spool.hold()
        aside = self._spill_dir if self._put_off else None
        recognise = self._pipeline.submit_known if self._groups else None
        buffers = self._tuning.buffers if self._put_off else self._tuning.buffers // 2  # else nobody is in a hurry
        self._feed = PageFeed(
            self._pipeline.submit_extents, self._pipeline.check, buffers, aside=aside, recognise=recognise
        )

    @property
    def feed(self) -> PageFeed:
        """Where a page server puts pages without a copy."""
        assert self._feed is not None, "begin() first"
        return self._feed

    def add_run(self, dst: str, vaddr: int, nr_pages: int, flags: int, data: Buffer | None) -> None:
        """Copying variant of `feed`: one run, with its bytes or None when it has none."""
        self.feed.open(dst)
        self.feed.run(vaddr, nr_pages, flags, data is not None)
        left = memoryview(data or b"").cast("B")
        while left:
            room = self.feed.window(vaddr, len(left))
            room[:] = left[: len(room)]
            vaddr, left = vaddr + len(room), left[len(room) :]

    def submit(self, data: Buffer) -> Future[int]:
        """Store a piece of 1 byte to 1 MiB; the future gives its chunk number, to be kept in a table of the caller's.
        `data` must not change until then. Blocks while too much is under way."""
        return self._running.submit(data)

    def submit_named(self, data: Buffer, ahead: bool = False) -> Future[str]:
        """As `submit`, but the future gives the chunk's id in hex, by which a later image may refer to it. `ahead`: the
        session does not stand still yet, and its memory is not on its way."""
        named: Future[str] = Future()

        def name(done: Future[int]) -> None:
            try:
                with self._running.lock:
                    named.set_result(self._running.table.ident(done.result()).hex())
            except BaseException as error:  # noqa: BLE001 - whatever it was, it reaches who waits
                named.set_exception(error)

        self._running.submit(data, ahead).add_done_callback(name)
        return named

    def has(self, ident: str) -> bool:
        """Whether `refer` would find this chunk."""
        return self._running.has(bytes.fromhex(ident))

    def refer(self, ident: str) -> bool:
        """Takes a chunk that the store has into this image without its bytes. False: it has none."""
        return self._running.refer(bytes.fromhex(ident)) is not None

    def keep(self, vaddr: int, kept: Kept) -> bool:
        """The window at `vaddr`, of what `feed` has open, is as it was. False: the store has it no more."""
        ref = layout.NO_CHUNK if kept.ident is None else self._running.refer(kept.ident)
        if ref is not None:
            self.feed.keep(vaddr, kept.flags, ref)
        return ref is not None

    @property
    def earlier(self) -> Earlier:
        """After `commit`: this memory, for the next one."""
        return Earlier(self._tables, self._running.table)

    def add_blob(self, name: str, data: Buffer) -> None:
        """Keep a named byte string in the image."""
        layout.checked_blob_name(name)
        if name in self._blobs:
            raise ValueError(f"two blobs named {name!r}")
        view = memoryview(data).cast("B")
        step = layout.MAX_CHUNK
        futures = [self.submit(view[at : at + step]) for at in range(0, len(view), step)]
        self._blobs[name] = len(view), futures
        self._blob_bytes += len(view)

    def end_input(self) -> None:
        """No more pages come. What was given is ours, not all of it digested yet: whoever gave it may go on.
        Raises StoreUnreachable and the like when the upload has failed already."""
        self.feed.done()
        self.feed.go_on()
        assert self._spool is not None
        self._spool.relax()
        self._running.check()

    def finish_input(self) -> None:
        """Until all that was given is digested and sealed, at the store's pace. Raises StoreUnreachable and the like
        when the upload has failed."""
        self.end_input()
        self.feed.finish()
        self._running.drain()

    def commit(self, token: int, facts: Mapping[str, Any] | None = None) -> Manifest:
        """`finish`, then `publish`."""
        result = self.finish(token, facts)
        self.publish(result)
        return result

    def finish(self, token: int, facts: Mapping[str, Any] | None = None) -> Manifest:
        """Wait until the store has all of the checkpoint but its manifest, and return that. The checkpoint can be read
        back by it, but does not exist for anyone else before `publish`."""
        self.finish_input()
        pipeline = self._running
        memory = 0
        for dst, extents in self.feed.extents.items():
            pages = table_of(extents)
            memory += pages.size
            self.add_blob(layout.PAGE_TABLES + dst, pages.encode())
            self._tables[dst] = pages
        blobs = {name: Blob(size, tuple(f.result() for f in futures)) for name, (size, futures) in self._blobs.items()}
        pipeline.drain()
        stored = sum(length for *_, length, _ in pipeline.table.rows())
        body = pipeline.table.encode()
        pieces = [body[at : at + layout.MAX_CHUNK] for at in range(0, len(body), layout.MAX_CHUNK)]
        table = [_direct(*pipeline.store_now(piece)) for piece in pieces]
        pipeline.flush()
        assert self._spool is not None
        self._spool.wait_stored()
        counts = pipeline.counts
        sizes = {
            "memory": memory,
            "zero": counts.zero,
            "blobs": self._blob_bytes,
            "reused": counts.reused,
            "stored": stored + sum(piece.length for piece in table),
            "new": counts.new + sum(piece.length for piece in table),
            "chunks": len(pipeline.table),
            "new_chunks": counts.new_chunks,
        }
        return Manifest(
            self.session, self.checkpoint, self._key.fingerprint, token, round(walltime(), 3), self.parent,
            tuple(pipeline.table.packs), tuple(table), blobs, sizes, dict(facts or {}),
        )  # fmt: skip

    def publish(self, result: Manifest) -> None:
        """Publish what `finish` returned. When this returns the checkpoint exists. When it raises it does not, but for
        one case: the store took the manifest and went away before it could say so. Then the checkpoint is a true one
        of a session that goes on, as with --leave-running, and the lease decides what it is good for."""
        self._publish(result)
        self._stop()
        self._unmark()
        if self._hints is not None and self._groups is not None:
            self._groups.save(self._hints, self.checkpoint)

    def abort(self) -> None:
        """Give up. What is uploaded already stays useful for the next try; nothing needs to be cleaned up."""
        self._stop()
        try:
            if self._uploaded:
                self._write_index()
            self._mark.end()
        except CmdopError as error:
            # The store is away: the mark runs out by itself, and the last index that was written serves the next try.
            _logger.warning("the upload was given up without a last word to the store: %s", error.message)
            self._mark.stop()

    def _unmark(self) -> None:
        """It is published: a store that does not hear of the end, or forbids to delete, changes nothing about that."""
        try:
            self._mark.end()
        except CmdopError as error:
            _logger.warning("the mark of this upload stays in the store until it is old: %s", error.message)

    @property
    def _running(self) -> Pipeline:
        assert self._pipeline is not None, "begin() first"
        return self._pipeline

    def _publish(self, result: Manifest) -> None:
        indexed = threads.start(self._write_index, "index")
        data = manifest.encode(result, self._key)
        manifest.decode(
            self.session, self.checkpoint, data, self._ring
        )  # what we could not read back we do not publish
        self._must_hold(result)
        indexed.result()
        try:
            done = self._store.put_new(result.name, data) or self._is_ours(result, data)
        except Unreachable:
            done = self._is_ours(result, data)  # the answer was lost: what is there decides
        if not done:
            raise StoreUnreachable("the manifest could not be published", "Run the checkpoint again.")
        try:
            self._must_hold(result)
        except CmdopError:
            self._store.delete([result.name])
            raise

    def _is_ours(self, result: Manifest, data: bytes) -> bool:
        """A put whose answer was lost and that was tried again finds its own object."""
        try:
            return self._store.get(result.name) == data
        except KeyError:
            return False

    def _must_hold(self, result: Manifest) -> None:
        if not self._mark.holds(result.packs):
            raise StoreUnreachable(
                "the upload took so long that a prune removed parts of it", "Run the checkpoint again."
            )

    def _parent_table(self) -> dict[str, ChunkTable]:
        """The chunks of the parent checkpoint: the best guess at what this one needs, however old their packs are."""
        if self.parent is None:
            return {}
        try:
            parent = catalog.load(self._store, self._ring, self.parent, self.session)
            if parent.key != self._key.fingerprint:
                return {}
            return {self.parent: load_table(self._store, parent, self._sealer)}
        except (CheckpointNotFound, ImageRefused) as error:
            _logger.warning("the parent checkpoint is of no use: %s", error)
            return {}

    def _on_stored(self, pack: str, numbers: list[int], _length: int) -> None:
        """Now and then, index what is stored, so that an upload cut off at any point is not sent twice."""
        self._uploaded.append((pack, numbers))
        if self._on_pack is not None:
            self._on_pack(pack)
        if len(self._uploaded) < self._next_index or not self._index_lock.acquire(blocking=False):
            return
        try:
            self._next_index = len(self._uploaded) * 2
            self._store.put(layout.index_name(self.checkpoint), self._encode_index())
        finally:
            self._index_lock.release()

    def _write_index(self) -> None:
        with self._index_lock:
            self._store.put(layout.index_name(self.checkpoint), self._encode_index())

    def _encode_index(self) -> bytes:
        stored, records = list(self._uploaded), []
        for number, (_, chunks) in enumerate(stored):
            with self._running.lock:
                records.append(self._running.table.part(chunks, number))
        body = encode([pack for pack, _ in stored], b"".join(records))
        return index.seal(self.checkpoint, body, self._sealer)

    def _stop(self) -> None:
        if self._spool is not None:
            self._spool.give_up()
        if self._feed is not None:
            self._feed.stop()
        if self._pipeline is not None:
            self._pipeline.stop()
        if self._spool is not None:
            self._spool.stop()
        if self._ledger is not None:
            self._ledger.close()


def _direct(ident: bytes, place: Place) -> Direct:
    return Direct(ident, place.pack, place.offset, place.length, place.size)
