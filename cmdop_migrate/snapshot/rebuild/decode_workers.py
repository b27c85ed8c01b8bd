"""Memory on its way back is decoded by processes of their own (util/worker_process.py).

A chunk is opened so quickly that two threads of one process wait for each other's interpreter more than they
decode. Each process here has a megabyte that we see, too: it is told what to put there, and says when it is done.
It has nothing of ours but the sealed image.
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
from cmdop_migrate.snapshot.session_memory import Later, Source
from cmdop_migrate.util.worker_process import WorkerProcess, close_all

_MOST = 4
_JOB = struct.Struct("<qQQ")  # pid inside, start, size
_ZEROS, _DATA, _REFUSED = b"0", b"1", b"2"
_log = log.get("decoders")


@contextlib.contextmanager
def started(source: Source) -> Iterator[list[pager.Filler]]:
    """One more than there are processors: while one places what is decoded, the others decode. Fewer, or none, where
    the machine has no more processes or memory to give: then threads decode."""
    made: list[Decoder] = []
    try:
        for _ in range(min(_MOST, (os.cpu_count() or 1) + 1)):
            try:
                made.append(Decoder(source))
            except OSError as error:
                _log.warning("no more decoders: %s", error)
                break
        yield list(made)
    finally:
        close_all(made)


class Decoder(WorkerProcess):
    """A filler for one thread."""

    def __init__(self, source: Source) -> None:
        """`source` has all of its image on this machine, and nobody uses it at this moment."""
        self.buffer = memoryview(mmap.mmap(-1, address_space.BLOCK))
        self._is_there = True

        def decode(sock: socket.socket) -> None:
            while len(job := sock.recv(_JOB.size, socket.MSG_WAITALL)) == _JOB.size:
                sock.sendall(_answer(source, job, self.buffer))

        super().__init__(decode, source.descriptors(), pager.NICE)

    def fill(self, memory: address_space.Memory, start: int, size: int) -> bool:
        assert isinstance(memory, Later)
        answer = self._ask(_JOB.pack(memory.pid, start, size)) if self._is_there else b""
        if answer in (_ZEROS, _DATA):
            return answer == _DATA
        if self._is_there:  # it died, or has seen what we must see ourselves to say what is wrong
            _log.info("a decoder gave up: its work is done here")
            self._is_there = False
        return memory.fill(start, self.buffer[:size])

    def _ask(self, job: bytes) -> bytes:
        try:
            self.sock.sendall(job)
        except OSError:
            return b""
        return self.hear()


def _answer(source: Source, job: bytes, buffer: memoryview) -> bytes:
    """In the process."""
    pid, start, size = _JOB.unpack(job)
    try:
        return _DATA if source.later(pid).fill(start, buffer[:size]) else _ZEROS
    except BaseException:  # noqa: BLE001 - who asked will run into the same, and can say so
        return _REFUSED
