"""Decode memory during a restore in worker processes (util/worker_process.py).

Decrypting and decompressing a chunk is so quick that two threads of one process would wait for the interpreter lock
more than they decode. Each worker shares one megabyte of memory with this process: it receives a job, writes the
decoded memory there and answers. It inherits nothing but the sealed image.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from collections.abc import Iterator

from cmdop_migrate import log
from cmdop_migrate.criu.lazy import address_space, pager
from cmdop_migrate.snapshot.session_memory import LazyMemory, MemorySource
from cmdop_migrate.util.worker_process import WorkerProcess, close_all

_MAX_WORKERS = 4
_JOB = struct.Struct("<qQQ")  # pid inside, start, size
_ZEROS, _DATA, _REFUSED = b"0", b"1", b"2"
_log = log.get("decoders")


@contextlib.contextmanager
def started(source: MemorySource) -> Iterator[list[pager.Filler]]:
    """Start the workers, and end them at the end of the block. There is one more than processors: while the memory of
    one is being placed, the others decode. There are fewer, or none, if the machine is out of processes or memory:
    then threads decode."""
    workers: list[DecodeWorker] = []
    try:
        for _ in range(min(_MAX_WORKERS, (os.cpu_count() or 1) + 1)):
            try:
                workers.append(DecodeWorker(source))
            except OSError as error:
                _log.warning("no more decode workers can be started: %s", error)
                break
        yield list(workers)
    finally:
        close_all(workers)


class DecodeWorker(WorkerProcess):
    """Decode memory for one thread of the pager."""

    def __init__(self, source: MemorySource) -> None:
        """Start the worker. `source` must have its whole image on this machine, and no thread may use it now."""
        self.buffer = memoryview(mmap.mmap(-1, address_space.BLOCK))
        self._is_usable = True

        def decode(sock: socket.socket) -> None:
            while len(job := sock.recv(_JOB.size, socket.MSG_WAITALL)) == _JOB.size:
                sock.sendall(_answer(source, job, self.buffer))

        super().__init__(decode, source.descriptors(), pager.PREFETCH_NICE)

    def fill(self, memory: address_space.Memory, start: int, size: int) -> bool:
        """Decode memory into `buffer`; return False if it is all zeros. If the worker died or failed, this process
        decodes instead, and raises the error."""
        assert isinstance(memory, LazyMemory)
        answer = self._ask(_JOB.pack(memory.pid, start, size)) if self._is_usable else b""
        if answer in (_ZEROS, _DATA):
            return answer == _DATA
        if self._is_usable:
            _log.info("a decode worker failed: this process decodes in its place")
            self._is_usable = False
        return memory.fill(start, self.buffer[:size])

    def _ask(self, job: bytes) -> bytes:
        try:
            self.sock.sendall(job)
        except OSError:
            return b""
        return self.hear()


def _answer(source: MemorySource, job: bytes, buffer: memoryview) -> bytes:
    """Do one job, in the worker process."""
    pid, start, size = _JOB.unpack(job)
    try:
        return _DATA if source.later(pid).fill(start, buffer[:size]) else _ZEROS
    except BaseException:  # noqa: BLE001 - the parent decodes the same memory then, and raises the error
        return _REFUSED
