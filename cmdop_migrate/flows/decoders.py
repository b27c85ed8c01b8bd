"""Memory on its way back is decoded by processes of their own.

A chunk is opened so quickly that two threads of one process wait for each other's interpreter more than they
decode. Each process here has a megabyte that we see, too: it is told what to put there, and says when it is done.

It has nothing of ours but the sealed image: no lock, no terminal, no userfaultfd. It ends when we do, whatever
becomes of us; whatever becomes of it, its work is done here.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import socket
import struct
import time
from collections.abc import Collection, Iterator

from cmdop_migrate import log
from cmdop_migrate.criu import pager, space
from cmdop_migrate.flows.memory import Later, Source

_MOST = 4
_JOB = struct.Struct("<qQQ")  # pid inside, start, size
_ZEROS, _DATA, _REFUSED = b"0", b"1", b"2"
_PATIENCE = 1.0
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
        for one in made:  # all are told before one is waited for
            one.dismiss()
        for one in made:
            one.close()


class Decoder:
    """A filler for one thread."""

    def __init__(self, source: Source) -> None:
        """`source` has all of its image on this machine, and nobody uses it at this moment."""
        self.buffer = memoryview(mmap.mmap(-1, space.BLOCK))
        self._sock, theirs = socket.socketpair()
        with theirs:
            try:
                self.pid = os.fork()
            except OSError:
                self._sock.close()
                raise
            if self.pid == 0:
                _decode(source, theirs, self.buffer)
        self._is_there = True

    def fill(self, memory: space.Memory, start: int, size: int) -> bool:
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
            self._sock.sendall(job)
            return self._sock.recv(1)
        except OSError:
            return b""

    def dismiss(self) -> None:
        """No thread uses it any more: it may end."""
        self._sock.close()

    def close(self) -> None:
        """Until it has ended."""
        self.dismiss()
        until = time.monotonic() + _PATIENCE
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return
            time.sleep(0.001)


def _decode(source: Source, sock: socket.socket, buffer: memoryview) -> None:
    """The process. Never returns."""
    try:
        gc.disable()  # what it has inherited stays shared
        _close_all_but({sock.fileno(), *source.descriptors()})
        os.nice(pager.NICE)
        while len(job := sock.recv(_JOB.size, socket.MSG_WAITALL)) == _JOB.size:
            pid, start, size = _JOB.unpack(job)
            try:
                is_data = source.later(pid).fill(start, buffer[:size])
            except BaseException:  # noqa: BLE001 - who asked will run into the same, and can say so
                sock.sendall(_REFUSED)
            else:
                sock.sendall(_DATA if is_data else _ZEROS)
    finally:
        os._exit(0)


def _close_all_but(kept: Collection[int]) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the one we list with
                os.close(fd)
