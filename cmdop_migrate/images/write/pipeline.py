"""digest -> known? -> compress -> seal -> pack, on several threads.

Work comes in buffers of some MiB, not chunk by chunk: what Python itself costs
per chunk must stay small beside the hashing. A chunk is sealed straight from
the buffer it arrived in into the pack it leaves in.
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
from cmdop_migrate.images.store.index import Known
from cmdop_migrate.images.write.fingerprints import GROUP, LEAST, NO_IDENT, Groups, Piece, pieces
from cmdop_migrate.images.write.upload_queue import Spool

T = TypeVar("T")
_Fresh = tuple[bytes, int, memoryview]  # id, number, content
_ZEROS = bytes(GROUP)
_SHORT_ZEROS = memoryview(_ZEROS)
PENDING = 24 << 20  # bytes of submitted data that wait for a worker


@dataclass
class Counts:
    """What went through. `raw` and `reused` in plain bytes, `new` in sealed ones."""

    raw: int = 0
    zero: int = 0
    reused: int = 0
    new: int = 0
    new_chunks: int = 0


class Pipeline:
    """Turns bytes into numbers of chunks in `table`, each stored or on its way."""

    def __init__(
        self, sealer: Sealer, known: Known, spool: Spool, workers: int | None = None, groups: Groups | None = None
    ) -> None:
        self.table = ChunkTable()
        self.counts = Counts()
        self.lock = threading.Lock()  # table and counts
        self._sealer = sealer
        self._known = known
        self._groups = groups
        self._spool = spool
        self._pack: Pack | None = None
        self._pack_lock = threading.Lock()  # may wait for the store, inside
        self._fill_lock = threading.Lock()  # `closed` and `unfilled` of packs: whoever has filled a pack never waits
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(workers or max(2, os.cpu_count() or 2), "seal")
        # A frozen session waits for its files to be captured: they do not queue behind its memory.
        self._files = ThreadPoolExecutor(1, "seal-files")
        self._idle = threading.Condition()
        self._tasks = 0
        self._bytes = 0
        self._failure: BaseException | None = None

    def check(self) -> None:
        """Raise what went wrong behind the caller's back."""
        failure = self._failure or self._spool.failure
        if failure is not None:
            raise failure

    def submit_extents(
        self, buffer: bytearray, extents: Sequence[Extent], release: Callable[[bytearray], None]
    ) -> None:
        """Store memory; fills in each extent's refs, then gives the buffer back."""
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
        """As `submit_extents`, if the store has all of it; else `otherwise` gets it, unless it says no."""
        self._start(0)

        def work() -> None:
            is_ours = True
            try:
                if not self._recognise(buffer, extents):
                    is_ours = not otherwise(buffer, extents)
                    if is_ours:
                        self._extents(buffer, extents)
            finally:
                if is_ours:
                    release(buffer)

        self._pool.submit(self._guard, work, 0)

    def submit(self, data: Buffer, ahead: bool = False) -> Future[int]:
        """Store one chunk of at most MAX_CHUNK bytes, which must not change until the future is done. Its number.
        `ahead`: before there is any memory, so that it may have all the workers."""
        if not 0 < len(data) <= layout.MAX_CHUNK:
            raise ValueError(f"a chunk has 1 to {layout.MAX_CHUNK} bytes, not {len(data)}")
        self._start(len(data))
        pool = self._pool if ahead else self._files
        return pool.submit(self._guard, lambda: self._store([memoryview(data)])[0], len(data))

    def has(self, ident: bytes) -> bool:
        with self.lock:
            return self.table.find(ident) >= 0 or self._known.find(ident) is not None

    def refer(self, ident: bytes) -> int | None:
        """The number of a chunk that this image or the store has already; None when it must be sent."""
        with self.lock:
            number = self._refer(ident)
            if number is not None:
                self.counts.reused += self.table.place(number).size
            return number

    def store_now(self, data: Buffer) -> tuple[bytes, Place]:
        """Seal one chunk into the current pack without entering it in the table: for the table itself."""
        view = memoryview(data)
        ident = self._sealer.id_of(view)
        return ident, self._seal([(ident, -1, view)])[0]

    def drain(self) -> None:
        """Until all that was submitted is sealed, at the spool's pace."""
        with self._idle:
            self._idle.wait_for(lambda: not self._tasks)
        self.check()

    def flush(self) -> None:
        """Send the pack that is open. Only after `drain`."""
        with self._pack_lock:
            pack, self._pack = self._pack, None
            if pack is not None:
                self._spool.push(pack, pack.finish(self._sealer))

    def stop(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=False)
        self._files.shutdown(wait=True, cancel_futures=False)

    def _start(self, size: int) -> None:
        self.check()
        with self._idle:
            self._idle.wait_for(lambda: self._bytes + size <= PENDING or not self._bytes)
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
        """All of it, or, from the first piece on that is not as it was, nothing."""
        found = []
        for piece in pieces(extents):
            key, refs = self._find(buffer, piece)
            if refs is None:
                return False
            found.append((piece, key, refs))
        for piece, key, refs in found:
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
        """Its key, if it is worth one, and the chunks of its windows, if all of them are known."""
        if self._groups is None or piece.size < LEAST:
            return b"", None
        if _is_zero(buffer, piece.at, piece.size):
            return b"", array("I", [layout.NO_CHUNK]) * window_count(piece.vaddr, piece.size)
        key = self._groups.key(memoryview(buffer)[piece.at : piece.at + piece.size], piece.vaddr)
        refs = array("I")
        with self.lock:
            for ident in self._groups.find(key) or ():
                number = layout.NO_CHUNK if ident == NO_IDENT else self._refer(ident)
                if number is None:  # the store has it no more
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
            if key and self._groups is not None:
                idents = [NO_IDENT if ref == layout.NO_CHUNK else self.table.ident(ref) for ref in refs]
                self._groups.keep(key, idents)
        piece.extent.refs[piece.slot : piece.slot + len(refs)] = refs

    def _windows(self, buffer: bytearray, piece: Piece) -> array[int]:
        view, refs, kept = memoryview(buffer), array("I"), []
        for slot, (offset, size) in enumerate(windows(piece.vaddr, piece.size)):
            at = piece.at + offset
            refs.append(layout.NO_CHUNK)
            if not _is_zero(buffer, at, size):
                kept.append((slot, view[at : at + size]))
        numbers = self._store([one for _, one in kept])
        for (slot, _), number in zip(kept, numbers, strict=True):
            refs[slot] = number
        return refs

    def _store(self, views: Sequence[memoryview]) -> list[int]:
        """Their numbers. Each step is taken with all of them, for locks and bookkeeping cost as much for one chunk as
        for many; of a megabyte, what was digested is still in the cache when it is sealed."""
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
        """With the lock held: the number of a chunk that this image has, or the store. None: neither."""
        number = self.table.find(ident)
        if number >= 0:
            return number
        found = self._known.find(ident)
        if found is None:
            return None
        pack, place = found
        return self.table.add(ident, Place(self.table.pack_number(pack), place.offset, place.length, place.size))

    def _seal(self, fresh: Sequence[_Fresh]) -> list[Place]:
        """Compress, then seal straight into a pack, or two where they do not fit into one."""
        pack = self._codec().pack
        ready = [(*pack(view), ident, number, len(view)) for ident, number, view in fresh]
        places: list[Place] = []
        while len(places) < len(ready):
            places += self._seal_into_one(ready[len(places) :])
        return places

    def _seal_into_one(self, ready: Sequence[tuple[int, Buffer, bytes, int, int]]) -> list[Place]:
        """As many as go into the pack that is open, but one at least."""
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
            self._spool.push(pack, pack.finish(self._sealer))
        return places

    def _room(self, length: int) -> Pack:
        """With the pack lock held: a pack with that much room. The last to fill a closed pack sends it."""
        pack = self._pack
        if pack is not None and not pack.fits(length):
            self._pack = None
            with self._fill_lock:
                pack.closed = True
                done = not pack.unfilled
            if done:
                self._spool.push(pack, pack.finish(self._sealer))
            pack = None
        if pack is None:
            buffer = self._spool.take()
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
