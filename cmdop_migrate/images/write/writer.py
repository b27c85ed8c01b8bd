"""Make a checkpoint: take bytes in, put packs, publish the manifest last.

begin                             mark the upload, then read what the store already has
feed, submit, add_blob            from here on no call waits for the store
end_input                         all input is in our memory; the session may resume
finish_input                      all input is digested and sealed, at the store's pace
finish                            wait until the store has everything but the manifest
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
from cmdop_migrate.images.format.manifest import Blob, Manifest, TablePiece
from cmdop_migrate.images.format.seal import Sealer
from cmdop_migrate.images.format.windows import PageTable, table_of
from cmdop_migrate.images.read.load_table import load_table
from cmdop_migrate.images.store import catalog, deletion_marks, index, index_cache
from cmdop_migrate.images.store.index_cache import IndexCache
from cmdop_migrate.images.store.upload_marks import STALE_AFTER, UploadMark
from cmdop_migrate.images.write import page_buffers
from cmdop_migrate.images.write.fingerprints import BlockFingerprints
from cmdop_migrate.images.write.page_buffers import PageBuffers
from cmdop_migrate.images.write.pipeline import Pipeline
from cmdop_migrate.images.write.previous_round import PreviousRound, UnchangedWindow
from cmdop_migrate.images.write.upload_queue import BUFFERS, UPLOADERS, UploadQueue
from cmdop_migrate.storage.base import Store
from cmdop_migrate.util import threads

_FIRST_INDEX = 8  # packs stored before the first index of an unfinished upload
_logger = log.get("images.writer")


@dataclass(frozen=True)
class WriterOptions:
    """Choose memory, threads and what is deferred while the session is frozen.

    Peak memory is about `buffers` MiB of input plus `pack_buffers` and `uploaders` times 8 MiB. Two options leave the
    machine to the frozen session until `end_input`: with `hold` no pack is sent; with `defer` raw pages are spilled to
    disk, except blocks unchanged since the parent (hashing is cheaper than writing). `fingerprints` is the session's
    file by which unchanged blocks are recognised, `index_caches` the directory of this host's index caches.
    """

    workers: int | None = None
    buffers: int = page_buffers.BUFFERS
    uploaders: int = UPLOADERS
    pack_buffers: int = BUFFERS
    index_timeout: float = index.INDEX_READ_TIMEOUT
    stale_after: float = STALE_AFTER
    hold: bool = False
    defer: bool = False
    fingerprints: Path | None = None
    index_caches: Path | None = None


class ImageWriter:
    """Write one checkpoint of one session. Feed pages from one thread; call `submit` and `add_blob` from any."""

    def __init__(
        self,
        store: Store,
        ring: KeyRing,
        session: str,
        spill_dir: Path,
        parent: str | None = None,
        options: WriterOptions | None = None,
        on_pack: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare a checkpoint of `session`; nothing is sent before `begin`. `on_pack` is called, from any thread, with
        the id of each pack after the store has it."""
        self.session = layout.checked_id(session, "session id")
        self.checkpoint = layout.new_id()
        self.parent = parent
        self._store, self._ring, self._spill_dir = store, ring, spill_dir
        self._options = options = options or WriterOptions()
        self._key = ring.current
        self._sealer = Sealer(self._key)
        self._mark = UploadMark(store, session, self.checkpoint, options.stale_after)
        self._blobs: dict[str, tuple[int, list[Future[int]]]] = {}
        self._blob_bytes = 0
        self._on_pack = on_pack
        self._cache: IndexCache | None = None
        self._fingerprints = BlockFingerprints(self._sealer) if options.fingerprints is not None else None
        self._uploaded: list[tuple[str, list[int]]] = []
        self._next_index = _FIRST_INDEX
        self._index_lock = threading.Lock()
        self._uploads: UploadQueue | None = None
        self._pipeline: Pipeline | None = None
        self._feed: PageBuffers | None = None
        self._tables: dict[str, PageTable] = {}

    def begin(self) -> None:
        """Mark the upload, then read the deletion marks, then list the packs: this order is the protocol
        (images/store/prune.py). Call it before the freeze: on a large store it takes a moment."""
        with ThreadPoolExecutor(1, "parent") as pool:
            parent = pool.submit(self._parent_table)  # the packs it names count only if usable
            self._mark.begin()
            marked = deletion_marks.packs_marked(self._store)
            usable = index.usable_packs(self._store, marked)
            first = parent.result() if usable else {}
        options = self._options
        caches = options.index_caches
        self._cache = IndexCache(self._key, caches and index_cache.path_of(caches, self._store.url, self._key))
        known = index.load_known(self._store, self._ring, usable, self._cache, first, options.index_timeout)
        self._uploads = UploadQueue(
            self._store, self._spill_dir, self._on_stored, options.pack_buffers, options.uploaders
        )
        if first and options.fingerprints and self._fingerprints is not None and self.parent is not None:
            # Only here: fingerprints are useless in a store that lacks the chunks they lead to.
            self._fingerprints.load(options.fingerprints, self.parent)
        self._pipeline = Pipeline(self._sealer, known, self._uploads, options.workers, self._fingerprints)
        if options.hold:
            self._uploads.hold()
        spill_dir = self._spill_dir if options.defer else None
        # Half of the buffers do where no session waits frozen for its memory to be taken.
        buffers = options.buffers if options.defer else options.buffers // 2
        self._feed = PageBuffers(self._pipeline, buffers, spill_dir=spill_dir, recognise=bool(self._fingerprints))

    @property
    def feed(self) -> PageBuffers:
        """Return the buffers into which a page server puts pages without a copy."""
        assert self._feed is not None, "begin() first"
        return self._feed

    def submit(self, data: Buffer) -> Future[int]:
        """Store 1 byte to 1 MiB; the future gives the chunk number, for a table of the caller's. `data` must not change
        until then. Block while too much is under way."""
        return self._running.submit(data)

    def submit_named(self, data: Buffer, ahead: bool = False) -> Future[str]:
        """Store as `submit` does; the future gives the chunk's id in hex, by which a later image may refer to it.
        `ahead`: the session is not frozen yet, so no memory competes for the workers."""
        named: Future[str] = Future()

        def name(done: Future[int]) -> None:
            try:
                with self._running.lock:
                    named.set_result(self._running.table.ident(done.result()).hex())
            except BaseException as error:  # noqa: BLE001 - the waiting caller gets it, of any kind
                named.set_exception(error)

        self._running.submit(data, ahead).add_done_callback(name)
        return named

    def has(self, ident: str) -> bool:
        """Tell whether `refer` would find this chunk."""
        return self._running.has(bytes.fromhex(ident))

    def refer(self, ident: str) -> bool:
        """Add a chunk that the store already has to this image. Return False if the store lacks it."""
        return self._running.refer(bytes.fromhex(ident)) is not None

    def keep(self, vaddr: int, window: UnchangedWindow) -> bool:
        """Reuse the chunk of the unchanged window at `vaddr`, of the target that `feed` has open. Return False if the
        store no longer has it."""
        ref = layout.NO_CHUNK if window.ident is None else self._running.refer(window.ident)
        if ref is not None:
            self.feed.keep(vaddr, window.flags, ref)
        return ref is not None

    @property
    def previous_round(self) -> PreviousRound:
        """Return the memory of this checkpoint after `commit`, for the next pre-copy round."""
        return PreviousRound(self._tables, self._running.table)

    def add_blob(self, name: str, data: Buffer) -> None:
        """Add a named byte string to the image."""
        layout.checked_blob_name(name)
        if name in self._blobs:
            raise ValueError(f"two blobs named {name!r}")
        view = memoryview(data).cast("B")
        step = layout.MAX_CHUNK
        futures = [self.submit(view[at : at + step]) for at in range(0, len(view), step)]
        self._blobs[name] = len(view), futures
        self._blob_bytes += len(view)

    def end_input(self) -> None:
        """Declare that no more pages come. All input is in our memory, though not all digested: the session may resume.
        Raise StoreUnreachable or its kin if the upload has failed already."""
        self.feed.done()
        self.feed.start_deferred()
        assert self._uploads is not None
        self._uploads.relax()
        self._running.check()

    def finish_input(self) -> None:
        """Wait until all input is digested and sealed, at the store's pace. Raise StoreUnreachable or its kin if the
        upload has failed."""
        self.end_input()
        self.feed.finish()
        self._running.drain()

    def commit(self, token: int, facts: Mapping[str, Any] | None = None) -> Manifest:
        """Call `finish`, then `publish`."""
        result = self.finish(token, facts)
        self.publish(result)
        return result

    def finish(self, token: int, facts: Mapping[str, Any] | None = None) -> Manifest:
        """Wait until the store has the whole checkpoint except its manifest, and return the manifest. The checkpoint
        can be read back by it, but does not exist for any other reader before `publish`."""
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
        assert self._uploads is not None
        self._uploads.wait_stored()
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
        """Publish the manifest that `finish` returned. When this returns, the checkpoint exists. When it raises, the
        checkpoint does not exist, with one exception: the store took the manifest but its answer was lost. Then the
        checkpoint is a valid one of a session that keeps running, as with --leave-running, and the lease decides
        whether it is used."""
        self._publish(result)
        self._stop()
        self._unmark()
        if self._options.fingerprints is not None and self._fingerprints is not None:
            self._fingerprints.save(self._options.fingerprints, self.checkpoint)

    def abort(self) -> None:
        """Give up. Uploaded packs stay usable for the next try; no clean-up is needed."""
        self._stop()
        try:
            if self._uploaded:
                self._write_index()
            self._mark.end()
        except CmdopError as error:
            # The store does not answer. The mark expires by itself, and the last index written serves the next try.
            _logger.warning("upload aborted; its mark and index in the store were not updated: %s", error.message)
            self._mark.stop()

    def _unmark(self) -> None:
        """Remove the upload mark after publishing. A store that does not answer, or forbids deleting, does not undo the
        publication: log it."""
        try:
            self._mark.end()
        except CmdopError as error:
            _logger.warning("the mark of this upload stays in the store until it expires: %s", error.message)

    @property
    def _running(self) -> Pipeline:
        assert self._pipeline is not None, "begin() first"
        return self._pipeline

    def _publish(self, result: Manifest) -> None:
        indexed = threads.start(self._write_index, "index")
        data = manifest.encode(result, self._key)
        manifest.decode(self.session, self.checkpoint, data, self._ring)  # never publish what cannot be read back
        self._must_hold(result)
        indexed.result()
        try:
            done = self._store.put_new(result.name, data) or self._is_ours(result, data)
        except Unreachable:
            done = self._is_ours(result, data)  # the answer was lost: the stored object decides
        if not done:
            raise StoreUnreachable("the manifest could not be published", "Run the checkpoint again.")
        try:
            self._must_hold(result)
        except CmdopError:
            self._store.delete([result.name])
            raise

    def _is_ours(self, result: Manifest, data: bytes) -> bool:
        """Tell whether the stored manifest is ours: a retried put whose first answer was lost finds its own object."""
        try:
            return self._store.get(result.name) == data
        except KeyError:
            return False

    def _must_hold(self, result: Manifest) -> None:
        if not self._mark.holds(result.packs):
            raise StoreUnreachable(
                "the upload took so long that a prune run removed parts of it", "Run the checkpoint again."
            )

    def _parent_table(self) -> dict[str, ChunkTable]:
        """Return the chunk table of the parent checkpoint: the best guess at what this one needs, however old its packs
        are."""
        if self.parent is None:
            return {}
        try:
            parent = catalog.load(self._store, self._ring, self.parent, self.session)
            if parent.key != self._key.fingerprint:
                return {}
            return {self.parent: load_table(self._store, parent, self._sealer)}
        except (CheckpointNotFound, ImageRefused) as error:
            _logger.warning("the parent checkpoint cannot be used: %s", error)
            return {}

    def _on_stored(self, pack: str, numbers: list[int], _length: int) -> None:
        """Record a stored pack, and write an index now and then, so that an interrupted upload is not sent twice."""
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
        if self._uploads is not None:
            self._uploads.give_up()
        if self._feed is not None:
            self._feed.stop()
        if self._pipeline is not None:
            self._pipeline.stop()
        if self._uploads is not None:
            self._uploads.stop()
        if self._cache is not None:
            self._cache.close()


def _direct(ident: bytes, place: Place) -> TablePiece:
    return TablePiece(ident, place.pack, place.offset, place.length, place.size)
