"""Spill raw memory to disk while the session is frozen; digest and compress it after the session resumes.

The file is sealed with a key that is never stored, and has no name: what a crash leaves is useless to anyone. Writing
costs a third of digesting and sealing, which a frozen session would have to wait for.
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
_READ_AHEAD = 8  # buffers: the kernel does not read ahead of backward reads
_logger = log.get("images.spill")
Submit = Callable[[bytearray, Sequence[Extent], Callable[[bytearray], None]], None]
Release = Callable[[bytearray], None]


@dataclass(frozen=True)
class _Spilled:
    at: int  # offset in the file, which is also the nonce, so no nonce repeats. Zeros take no room, and no nonce
    is_zero: bool
    size: int
    batch: Sequence[Extent]


class SpillFile:
    """Take full buffers, from any thread, until `start_deferred`; then pass all of them to `submit`, in its own
    thread."""

    def __init__(self, directory: Path, submit: Submit, release: Release) -> None:
        """Open an unnamed file in `directory`. `release` takes back a buffer whose content is on disk."""
        self._submit, self._release = submit, release
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  closed in stop()
        self._seal = AESGCM(AESGCM.generate_key(128))  # 128 bits: one use, one machine, a session waits
        self._waiting: queue.SimpleQueue[tuple[bytearray, Sequence[Extent]] | None] = queue.SimpleQueue()
        self._spilled: list[_Spilled] = []
        self._zeros = b""
        self._end = 0
        self._is_full = False
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # no buffer may be queued after the end marker
        self._get: Callable[[], bytearray] | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="spill", daemon=True)
        self._thread.start()

    def put(self, buffer: bytearray, batch: Sequence[Extent]) -> bool:
        """Queue a buffer without waiting. Return False if it is too late to spill."""
        with self._lock:
            if self._get is None and not self._stopped.is_set():
                self._waiting.put((buffer, batch))
                return True
        return False

    def check(self) -> None:
        """Raise the error that stopped spilling, if any: after it no buffer is released either."""
        if self._failure is not None:
            raise self._failure

    def start_deferred(self, get: Callable[[], bytearray]) -> None:
        """End the input and start reading back. `get` waits for a free buffer to read into."""
        with self._lock:
            if self._get is None:
                self._get = get
                self._waiting.put(None)

    def finish(self) -> None:
        """Wait, after `start_deferred`, until everything is submitted. Raise the error that made this impossible."""
        self._thread.join()
        self.check()

    def stop(self) -> None:
        """Stop the thread, drop what is still in the file, and close it."""
        with self._lock:
            self._stopped.set()
            self._waiting.put(None)
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        try:
            scratch = bytearray(0)
            while (given := self._waiting.get()) is not None and not self._stopped.is_set():
                buffer, batch = given
                size = max((extent.offset + extent.size for extent in batch), default=0)
                if len(scratch) != size + _TAG:
                    scratch = bulk_io.buffer(size + _TAG)
                if self._spill(buffer, size, batch, scratch):
                    self._release(buffer)
                else:
                    self._submit(buffer, batch, self._release)
            while self._spilled and self._get is not None and not self._stopped.is_set():
                spilled = self._spilled.pop()  # from the end: truncating frees disk space that packs may need
                for soon in self._spilled[-_READ_AHEAD:] if len(self._spilled) % _READ_AHEAD == 0 else ():
                    os.posix_fadvise(self._file.fileno(), soon.at, soon.size + _TAG, os.POSIX_FADV_WILLNEED)
                buffer = self._get()
                self._read(spilled, buffer)
                os.ftruncate(self._file.fileno(), spilled.at)
                self._submit(buffer, spilled.batch, self._release)
        except BaseException as error:  # noqa: BLE001 - a thread's end: `finish` raises it to the waiting caller
            self._failure = error

    def _spill(self, buffer: bytearray, size: int, batch: Sequence[Extent], scratch: bytearray) -> bool:
        """Write one buffer to the file. Return False if the disk is full: then the work must be done now."""
        if self._is_full:
            return False
        if len(self._zeros) != size:
            self._zeros = bytes(size)
        if buffer.startswith(self._zeros):
            self._spilled.append(_Spilled(self._end, True, size, batch))
            return True
        with memoryview(buffer) as view:
            self._seal.encrypt_into(_nonce(self._end), view[:size], None, scratch)
        try:
            bulk_io.write(self._file.fileno(), scratch, self._end, cached=False)
        except OSError as error:
            _logger.warning("cannot spill memory to disk (%s): the session stays frozen longer", error.strerror)
            self._is_full = True
            return False
        self._spilled.append(_Spilled(self._end, False, size, batch))
        self._end += len(scratch)
        return True

    def _read(self, spilled: _Spilled, buffer: bytearray) -> None:
        if spilled.is_zero:
            buffer[: spilled.size] = bytes(spilled.size)
            return
        sealed = bulk_io.buffer(spilled.size + _TAG)
        if bulk_io.read(self._file.fileno(), memoryview(sealed), spilled.at) != len(sealed):
            raise _corrupted()
        try:
            with memoryview(buffer) as view:
                self._seal.decrypt_into(_nonce(spilled.at), sealed, None, view[: spilled.size])
        except InvalidTag:
            raise _corrupted() from None


def _corrupted() -> Blocked:
    return Blocked(
        "disk corruption: spilled memory failed authentication",
        "The session keeps running. Check the disk of state_dir (`dmesg`), then checkpoint again.",
    )


def _nonce(at: int) -> bytes:
    return at.to_bytes(12, "big")
