"""Queue finished packs for upload: in memory, and beyond a budget on disk.

This keeps a slow store out of the freeze: until `relax`, queueing a pack never waits for the store, unless memory and
disk are both full. Spilled packs are sealed already, and the spill file has no name, so nothing is left behind.
"""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cmdop_migrate import log
from cmdop_migrate.errors import StoreUnreachable
from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.packs import Pack
from cmdop_migrate.storage.base import Store
from cmdop_migrate.util import bulk_io

BUFFERS = 5
UPLOADERS = 3
_logger = log.get("images.uploads")


@dataclass
class _Waiting:
    """Describe a queued pack, which is in its buffer or in a slot of the spill file."""

    ident: str
    numbers: list[int]
    length: int
    buffer: bytearray | None
    slot: int = -1


class UploadQueue:
    """Own a fixed set of pack buffers, a queue, and the threads that put packs into the store."""

    def __init__(
        self,
        store: Store,
        spill_dir: Path,
        stored: Callable[[str, list[int], int], None],
        buffers: int = BUFFERS,
        uploaders: int = UPLOADERS,
    ) -> None:
        """Start the uploader threads. `stored(pack, chunk numbers, length)` is called, from any thread, after each
        put."""
        self._store = store
        self._spill_dir = spill_dir
        self._stored = stored
        self._free = [bytearray(0) for _ in range(max(buffers, uploaders + 2))]
        self._queue: deque[_Waiting] = deque()
        self._busy = 0  # packs being put or being spilled: neither queued nor stored
        self._changed = threading.Condition()
        self._file: BinaryIO | None = None
        self._slots: list[int] = []
        self._slot_count = 0
        self._disk_full = False
        self._stopping = False
        self._held = self._relaxed = False
        self.failure: BaseException | None = None
        self.spilled = 0
        self._threads = [threading.Thread(target=self._run, name=f"upload-{n}", daemon=True) for n in range(uploaders)]
        for thread in self._threads:
            thread.start()

    def take(self) -> bytearray:
        """Return a free pack buffer. If all are in use, spill a queued pack; wait for the store if that fails too, or
        after `relax`."""
        while True:
            with self._changed:
                victim = self._free_or_victim()
                if isinstance(victim, bytearray):
                    return victim if victim else bulk_io.buffer(layout.PACK_SIZE)
            self._spill(victim)

    def push(self, pack: Pack, length: int) -> None:
        """Queue a finished pack."""
        with self._changed:
            self._queue.append(_Waiting(pack.ident, pack.numbers, length, pack.buffer))
            self._changed.notify_all()

    def hold(self) -> None:
        """Send nothing until `relax`; spill what does not fit in memory. An upload costs digests and copies, here and
        in a server on this machine, that a frozen session would have to wait for."""
        with self._changed:
            self._held = True

    def relax(self) -> None:
        """Start or resume sending: the session is no longer frozen, so block on the store instead of spilling to
        disk."""
        with self._changed:
            self._held, self._relaxed = False, True
            self._changed.notify_all()

    def wait_stored(self) -> None:
        """Wait until everything pushed is in the store. Raise the error that made this impossible."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or not (self._queue or self._busy))
            if self.failure:
                raise self.failure

    def give_up(self) -> None:
        """Drop what is not stored yet, and fail the callers that wait for room."""
        with self._changed:
            self._stopping = True
            self._queue.clear()
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop the threads. Call it when no more packs are pushed."""
        self.give_up()
        for thread in self._threads:
            thread.join()
        with self._changed:
            self._free.clear()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _free_or_victim(self) -> bytearray | _Waiting:
        """Return, with the lock held, a buffer, or the newest pack in memory, removed from the queue to be spilled."""
        while True:
            if self.failure or self._stopping:
                raise self.failure or StoreUnreachable("the upload was aborted", "Run the checkpoint again.")
            if self._free:
                return self._free.pop()
            victim = next((w for w in reversed(self._queue) if w.buffer is not None), None)
            if victim is not None and not self._disk_full and not self._relaxed:
                self._queue.remove(victim)
                self._busy += 1
                return victim
            if self._held and self._disk_full:  # only the store can make room now
                self._held = False
                self._changed.notify_all()
            self._changed.wait()

    def _spill(self, victim: _Waiting) -> None:
        with self._changed:
            if self._slots:
                slot = self._slots.pop()
            else:
                slot, self._slot_count = self._slot_count, self._slot_count + 1
        buffer = victim.buffer
        assert buffer is not None
        try:
            self._write(slot, memoryview(buffer)[: victim.length])
        except OSError as error:
            _logger.warning("cannot spill packs to %s (%s): waiting for the store", self._spill_dir, error.strerror)
            with self._changed:
                self._disk_full = True
                self._slots.append(slot)
                self._requeue(victim)
            return
        with self._changed:
            victim.slot, victim.buffer = slot, None
            self.spilled += victim.length
            self._free.append(buffer)
            self._requeue(victim)

    def _requeue(self, victim: _Waiting) -> None:
        self._busy -= 1
        if not self._stopping:
            self._queue.append(victim)
        self._changed.notify_all()

    def _write(self, slot: int, data: memoryview) -> None:
        with self._changed:
            if self._file is None:
                self._spill_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self._spill_dir, buffering=0)  # noqa: SIM115  closed in stop()
            fd = self._file.fileno()
        bulk_io.write(fd, data, slot * layout.PACK_SIZE)

    def _run(self) -> None:
        while (waiting := self._next()) is not None:
            try:
                self._put(waiting)
            except BaseException as error:  # noqa: BLE001  a supervising loop: waiting callers get it
                with self._changed:
                    self.failure = self.failure or error
            finally:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def _next(self) -> _Waiting | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or (self._queue and not self._held and not self.failure))
            if self._stopping:
                return None
            self._busy += 1
            return self._queue.popleft()

    def _put(self, waiting: _Waiting) -> None:
        if waiting.buffer is not None:
            data = memoryview(waiting.buffer)[: waiting.length]
        else:
            assert self._file is not None
            data = memoryview(bulk_io.buffer(waiting.length))
            if bulk_io.read(self._file.fileno(), data, waiting.slot * layout.PACK_SIZE) != waiting.length:
                raise OSError(5, "the spill file was cut short", str(self._spill_dir))
        self._store.put(layout.pack_name(waiting.ident), data)
        with self._changed:
            if waiting.buffer is not None:
                self._free.append(waiting.buffer)
            else:
                self._slots.append(waiting.slot)
                self._disk_full = False
            self._changed.notify_all()
        self._stored(waiting.ident, waiting.numbers, waiting.length)
