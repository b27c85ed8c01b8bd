"""Turn input into sealed chunks on several threads: digest, look up, compress, seal, pack.

Work comes in buffers of some MiB, not chunk by chunk: Python's own cost per chunk must stay small beside the hashing. A
chunk is sealed straight from the buffer it arrived in into the pack it leaves in.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.chunk_table import ChunkTable, Place
from cmdop_migrate.images.format.codec import Buffer, Codec
from cmdop_migrate.images.format.packs import Pack
from cmdop_migrate.images.format.seal import CHUNK, OVERHEAD, Sealer
from cmdop_migrate.images.format.windows import Extent, window_count, windows
from cmdop_migrate.images.store.index import KnownChunks
from cmdop_migrate.images.write.fingerprints import BLOCK, LEAST, NO_IDENT, BlockFingerprints, Piece, pieces
from cmdop_migrate.images.write.upload_queue import UploadQueue

T = TypeVar("T")
_Fresh = tuple[bytes, int, memoryview]  # id, number, content
_ZEROS = bytes(BLOCK)
_SHORT_ZEROS = memoryview(_ZEROS)
PENDING_BYTES = 24 << 20  # limit of submitted data that waits for a worker


@dataclass
class Counts:
    """Count what went through: `raw`, `zero` and `reused` in plain bytes, `new` in sealed bytes."""

    raw: int = 0
    zero: int = 0
    reused: int = 0
    new: int = 0
    new_chunks: int = 0


class Pipeline:
    """Turn bytes into numbers of chunks in `table`, each stored or queued for upload."""

    def __init__(
        self,
        sealer: Sealer,
        known: KnownChunks,
        uploads: UploadQueue,
        workers: int | None = None,
        fingerprints: BlockFingerprints | None = None,
    ) -> None:
        self.table = ChunkTable()
        self.counts = Counts()
        self.lock = threading.Lock()  # table and counts
        self._sealer = sealer
        self._known = known
        self._fingerprints = fingerprints
        self._uploads = uploads
        self._pack: Pack | None = None
        self._pack_lock = threading.Lock()  # its owner may wait for the store
        self._fill_lock = (
            threading.Lock()
        )  # guards `closed` and `unfilled` of packs: a thread that filled a pack never waits
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(workers or max(2, os.cpu_count() or 2), "seal")
        # A frozen session waits for the capture of its files, so they do not queue behind its memory.
        self._files = ThreadPoolExecutor(1, "seal-files")
        self._idle = threading.Condition()
        self._tasks = 0
        self._bytes = 0
        self._failure: BaseException | None = None

    def check(self) -> None:
        """Raise the first error of a worker or an uploader, if any."""
        failure = self._failure or self._uploads.failure
        if failure is not None:
            raise failure

    def submit_extents(
        self, buffer: bytearray, extents: Sequence[Extent], release: Callable[[bytearray], None]
    ) -> None:
        """Store memory in the background: fill in each extent's refs, then release the buffer."""
        self._start(0)

        def work() -> None:
            try:
                self._extents(buffer, extents)
            finally:
                release(buffer)

        self._pool.submit(self._guard, work, 0)

    def submit_known(
        self,
        buffer: bytearray,
        extents: Sequence[Extent],
        release: Callable[[bytearray], None],
        otherwise: Callable[[bytearray, Sequence[Extent]], bool],
    ) -> None:
        """Store memory as `submit_extents` does if the store has all of it. Otherwise offer it to `otherwise`, and
        store it here only if that returns False."""
        self._start(0)

        def work() -> None:
            keeps_buffer = True
            try:
                if not self._recognise(buffer, extents):
                    keeps_buffer = not otherwise(buffer, extents)
                    if keeps_buffer:
                        self._extents(buffer, extents)
            finally:
                if keeps_buffer:
                    release(buffer)

        self._pool.submit(self._guard, work, 0)

    def submit(self, data: Buffer, ahead: bool = False) -> Future[int]:
        """Store one chunk of at most MAX_CHUNK bytes, which must not change until the future is done; the future gives
        its number. `ahead`: no memory is being fed yet, so the chunk may use all workers."""
        if not 0 < len(data) <= layout.MAX_CHUNK:
            raise ValueError(f"a chunk has 1 to {layout.MAX_CHUNK} bytes, not {len(data)}")
        self._start(len(data))
        pool = self._pool if ahead else self._files
        return pool.submit(self._guard, lambda: self._store([memoryview(data)])[0], len(data))

    def has(self, ident: bytes) -> bool:
        """Tell whether this image or the store has the chunk."""
        with self.lock:
            return self.table.find(ident) >= 0 or self._known.find(ident) is not None

    def refer(self, ident: bytes) -> int | None:
        """Return the number of a chunk that this image or the store already has, or None if it must be sent."""
        with self.lock:
            number = self._refer(ident)
            if number is not None:
                self.counts.reused += self.table.place(number).size
            return number

    def store_now(self, data: Buffer) -> tuple[bytes, Place]:
        """Seal one chunk into the open pack without adding it to the table: for the chunks of the table itself."""
        view = memoryview(data)
        ident = self._sealer.id_of(view)
        return ident, self._seal([(ident, -1, view)])[0]

    def drain(self) -> None:
        """Wait until everything submitted is sealed, at the pace of the upload queue."""
        with self._idle:
            self._idle.wait_for(lambda: not self._tasks)
        self.check()

    def flush(self) -> None:
        """Queue the open pack for upload. Call it only after `drain`."""
        with self._pack_lock:
            pack, self._pack = self._pack, None
            if pack is not None:
                self._uploads.push(pack, pack.finish(self._sealer))

    def stop(self) -> None:
        """Stop the worker threads after the work in progress."""
        self._pool.shutdown(wait=True, cancel_futures=False)
        self._files.shutdown(wait=True, cancel_futures=False)

    def _start(self, size: int) -> None:
        self.check()
        with self._idle:
            self._idle.wait_for(lambda: self._bytes + size <= PENDING_BYTES or not self._bytes)
            self._tasks += 1
            self._bytes += size

    def _guard(self, work: Callable[[], T], size: int) -> T:
        try:
            self.check()
            return work()
        except BaseException as error:
            self._failure = self._failure or error
            raise
        finally:
            with self._idle:
                self._tasks -= 1
                self._bytes -= size
                self._idle.notify_all()

    def _recognise(self, buffer: bytearray, extents: Sequence[Extent]) -> bool:
        """Refer to the known chunks of all pieces, or of none if any piece has changed."""
        recognised = []
        for piece in pieces(extents):
            key, refs = self._find(buffer, piece)
            if refs is None:
                return False
            recognised.append((piece, key, refs))
        for piece, key, refs in recognised:
            self._enter(piece, key, refs, is_known=True)
        return True

    def _extents(self, buffer: bytearray, extents: Sequence[Extent]) -> None:
        for piece in pieces(extents):
            key, refs = self._find(buffer, piece)
            is_known = refs is not None
            if refs is None:
                refs = self._windows(buffer, piece)
            self._enter(piece, key, refs, is_known)

    def _find(self, buffer: bytearray, piece: Piece) -> tuple[bytes, array[int] | None]:
        """Return the piece's fingerprint key, if it is large enough for one, and its chunk numbers, if all are
        known."""
        if self._fingerprints is None or piece.size < LEAST:
            return b"", None
        if _is_zero(buffer, piece.at, piece.size):
            return b"", array("I", [layout.NO_CHUNK]) * window_count(piece.vaddr, piece.size)
        key = self._fingerprints.key(memoryview(buffer)[piece.at : piece.at + piece.size], piece.vaddr)
        refs = array("I")
        with self.lock:
            for ident in self._fingerprints.find(key) or ():
                number = layout.NO_CHUNK if ident == NO_IDENT else self._refer(ident)
                if number is None:  # the store no longer has it
                    return key, None
                refs.append(number)
        return key, refs or None

    def _enter(self, piece: Piece, key: bytes, refs: array[int], is_known: bool) -> None:
        sizes = windows(piece.vaddr, piece.size)
        zero = sum(size for ref, (_, size) in zip(refs, sizes, strict=True) if ref == layout.NO_CHUNK)
        with self.lock:
            self.counts.raw += piece.size
            self.counts.zero += zero
            self.counts.reused += piece.size - zero if is_known else 0
            if key and self._fingerprints is not None:
                idents = [NO_IDENT if ref == layout.NO_CHUNK else self.table.ident(ref) for ref in refs]
                self._fingerprints.keep(key, idents)
        piece.extent.refs[piece.slot : piece.slot + len(refs)] = refs

    def _windows(self, buffer: bytearray, piece: Piece) -> array[int]:
        view, refs, kept = memoryview(buffer), array("I"), []
        for slot, (offset, size) in enumerate(windows(piece.vaddr, piece.size)):
            at = piece.at + offset
            refs.append(layout.NO_CHUNK)
            if not _is_zero(buffer, at, size):
                kept.append((slot, view[at : at + size]))
        numbers = self._store([window for _, window in kept])
        for (slot, _), number in zip(kept, numbers, strict=True):
            refs[slot] = number
        return refs

    def _store(self, views: Sequence[memoryview]) -> list[int]:
        """Return the numbers of these chunks, storing new ones. Each step takes all of them, because locks and
        bookkeeping cost as much for one chunk as for many; within one block, digested data is still in the CPU cache
        when it is sealed."""
        idents = [self._sealer.id_of(view) for view in views]
        numbers: list[int] = []
        fresh: list[_Fresh] = []
        with self.lock:
            for ident, view in zip(idents, views, strict=True):
                number = self._refer(ident)
                if number is None:
                    number = self.table.add(ident, Place(0, 0, 0, len(view)))
                    fresh.append((ident, number, view))
                else:
                    self.counts.reused += len(view)
                numbers.append(number)
        if fresh:
            places = self._seal(fresh)
            with self.lock:
                for (_, number, _), place in zip(fresh, places, strict=True):
                    self.table.set_place(number, place)
                    self.counts.new += place.length
                self.counts.new_chunks += len(fresh)
        return numbers

    def _refer(self, ident: bytes) -> int | None:
        """Return the number of a chunk that this image or the store has, else None. Call it with the lock held."""
        number = self.table.find(ident)
        if number >= 0:
            return number
        known = self._known.find(ident)
        if known is None:
            return None
        pack, place = known
        return self.table.add(ident, Place(self.table.pack_number(pack), place.offset, place.length, place.size))

    def _seal(self, fresh: Sequence[_Fresh]) -> list[Place]:
        """Compress the chunks, then seal them straight into one pack, or into two where one has too little room."""
        pack = self._codec().pack
        ready = [(*pack(view), ident, number, len(view)) for ident, number, view in fresh]
        places: list[Place] = []
        while len(places) < len(ready):
            places += self._seal_into_one(ready[len(places) :])
        return places

    def _seal_into_one(self, ready: Sequence[tuple[int, Buffer, bytes, int, int]]) -> list[Place]:
        """Seal as many chunks as the open pack has room for, at least one."""
        places: list[Place] = []
        with self._pack_lock:
            pack = self._room(len(ready[0][1]) + OVERHEAD)
            with self._fill_lock:
                for _, payload, ident, number, size in ready:
                    length = len(payload) + OVERHEAD
                    if not pack.fits(length):
                        break
                    places.append(Place(pack.number, pack.reserve(ident, number, length, size), length, size))
        try:
            view = memoryview(pack.buffer)
            nonces = self._sealer.nonces(len(places))
            for place, nonce, (codec, payload, ident, _, size) in zip(places, nonces, ready, strict=False):
                out = view[place.offset : place.offset + place.length]
                self._sealer.seal_into(out, CHUNK, ident, codec, payload, size, nonce)
        finally:
            with self._fill_lock:
                pack.unfilled -= len(places)
                done = pack.closed and not pack.unfilled
        if done:
            self._uploads.push(pack, pack.finish(self._sealer))
        return places

    def _room(self, length: int) -> Pack:
        """Return a pack with that much room, with the pack lock held. The thread that fills the last chunk of a closed
        pack queues it."""
        pack = self._pack
        if pack is not None and not pack.fits(length):
            self._pack = None
            with self._fill_lock:
                pack.closed = True
                done = not pack.unfilled
            if done:
                self._uploads.push(pack, pack.finish(self._sealer))
            pack = None
        if pack is None:
            buffer = self._uploads.take()
            pack = self._pack = Pack(layout.new_id(), buffer)
            with self.lock:
                pack.number = self.table.pack_number(pack.ident)
        return pack

    def _codec(self) -> Codec:
        codec: Codec | None = getattr(self._local, "codec", None)
        if codec is None:
            codec = self._local.codec = Codec()
        return codec


def _is_zero(buffer: bytearray, at: int, size: int) -> bool:
    return buffer.startswith(_SHORT_ZEROS[:size], at)
