"""Memory put aside on disk as it came, until whoever gave it goes on: then there is time to digest and compress it.

It is sealed with a key that nobody keeps, in a file that has no name: what a crash leaves is of no use to anyone.
Writing costs a third of digesting and sealing, which a frozen session would have to wait for.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cmdop_migrate import log
from cmdop_migrate.errors import Blocked
from cmdop_migrate.images.format.windows import Extent
from cmdop_migrate.util import bulk_io

_TAG = 16
_AHEAD = 8  # pieces: backwards the kernel does not guess what is read next
_logger = log.get("images.aside")
Submit = Callable[[bytearray, Sequence[Extent], Callable[[bytearray], None]], None]
Release = Callable[[bytearray], None]


@dataclass(frozen=True)
class _Kept:
    at: int  # in the file; also its nonce, so no two are sealed alike. The next one's, where there is nothing but zeros
    is_zero: bool
    size: int
    batch: Sequence[Extent]


class Aside:
    """Takes full buffers, from any thread, until `go_on`; then gives all to `submit`, in a thread of its own."""

    def __init__(self, directory: Path, submit: Submit, release: Release) -> None:
        """`release` takes a buffer back whose content is on disk."""
        self._submit, self._release = submit, release
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  closed in stop()
        self._seal = AESGCM(AESGCM.generate_key(128))  # of one use, on one machine: a session waits for it
        self._waiting: queue.SimpleQueue[tuple[bytearray, Sequence[Extent]] | None] = queue.SimpleQueue()
        self._kept: list[_Kept] = []
        self._zeros = b""
        self._end = 0
        self._is_full = False
        self._over = threading.Event()
        self._lock = threading.Lock()  # nothing comes after the end
        self._get: Callable[[], bytearray] | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="aside", daemon=True)
        self._thread.start()

    def put(self, buffer: bytearray, batch: Sequence[Extent]) -> bool:
        """Never waits. False: it is too late to put anything aside."""
        with self._lock:
            if self._get is None and not self._over.is_set():
                self._waiting.put((buffer, batch))
                return True
        return False

    def check(self) -> None:
        """Raises what made it impossible to keep more: then no buffer comes back any more either."""
        if self._failure is not None:
            raise self._failure

    def go_on(self, get: Callable[[], bytearray]) -> None:
        """No more comes. `get` waits for a free buffer, for what has to be read back."""
        with self._lock:
            if self._get is None:
                self._get = get
                self._waiting.put(None)

    def finish(self) -> None:
        """After `go_on`: until all of it is submitted. Raises what made that impossible."""
        self._thread.join()
        self.check()

    def stop(self) -> None:
        """What is still here is dropped."""
        with self._lock:
            self._over.set()
            self._waiting.put(None)
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        try:
            scratch = bytearray(0)
            while (given := self._waiting.get()) is not None and not self._over.is_set():
                buffer, batch = given
                size = max((one.offset + one.size for one in batch), default=0)
                if len(scratch) != size + _TAG:
                    scratch = bulk_io.buffer(size + _TAG)
                if self._keep(buffer, size, batch, scratch):
                    self._release(buffer)
                else:
                    self._submit(buffer, batch, self._release)
            while self._kept and self._get is not None and not self._over.is_set():
                one = self._kept.pop()  # the last first: then its room can be given back, which packs may need
                for soon in self._kept[-_AHEAD:] if len(self._kept) % _AHEAD == 0 else ():
                    os.posix_fadvise(self._file.fileno(), soon.at, soon.size + _TAG, os.POSIX_FADV_WILLNEED)
                buffer = self._get()
                self._read(one, buffer)
                os.ftruncate(self._file.fileno(), one.at)
                self._submit(buffer, one.batch, self._release)
        except BaseException as error:  # noqa: BLE001 - a thread's end: `finish` tells who waits
            self._failure = error

    def _keep(self, buffer: bytearray, size: int, batch: Sequence[Extent], scratch: bytearray) -> bool:
        """False: the disk is full. Then there is no way but to do all the work now."""
        if self._is_full:
            return False
        if len(self._zeros) != size:
            self._zeros = bytes(size)
        if buffer.startswith(self._zeros):
            self._kept.append(_Kept(self._end, True, size, batch))
            return True
        with memoryview(buffer) as view:
            self._seal.encrypt_into(_nonce(self._end), view[:size], None, scratch)
        try:
            bulk_io.write(self._file.fileno(), scratch, self._end, cached=False)
        except OSError as error:
            _logger.warning("cannot put memory aside (%s): the session stands still longer", error.strerror)
            self._is_full = True
            return False
        self._kept.append(_Kept(self._end, False, size, batch))
        self._end += len(scratch)
        return True

    def _read(self, one: _Kept, buffer: bytearray) -> None:
        if one.is_zero:
            buffer[: one.size] = bytes(one.size)
            return
        sealed = bulk_io.buffer(one.size + _TAG)
        if bulk_io.read(self._file.fileno(), memoryview(sealed), one.at) != len(sealed):
            raise _damaged()
        try:
            with memoryview(buffer) as view:
                self._seal.decrypt_into(_nonce(one.at), sealed, None, view[: one.size])
        except InvalidTag:
            raise _damaged() from None


def _damaged() -> Blocked:
    return Blocked(
        "this disk gave back other bytes than were put there", "The session goes on. See to the disk of state_dir."
    )


def _nonce(at: int) -> bytes:
    return at.to_bytes(12, "big")
