"""A process that works for one thread of ours. Threads of one process wait for each other's interpreter wherever what
they call returns often; processes do not.

It has nothing of ours but what it is given: no lock, no terminal, no connection. It ends when we do, whatever becomes
of us. Whatever becomes of it, whoever asks it is told, and does the work himself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Collection

PATIENCE = 1.0  # to end by itself
_MESSAGE = 64 << 10


class Offspring:
    """Answers one message at a time."""

    def __init__(self, answer: Callable[[bytes], bytes], keep: Collection[int] = (), nice: int = 0) -> None:
        """`answer` runs there, with `keep` of our descriptors open. What it raises is no answer: it goes on with the
        next message. Nobody holds a lock that it needs at this moment."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            _live(theirs, answer, keep, nice)
        theirs.close()
        self.is_there, self._buried = True, False

    def ask(self, message: bytes) -> bytes:
        """Its answer; nothing when it has none, now and from then on."""
        said = b""
        if self.is_there:
            with contextlib.suppress(OSError):
                self._sock.send(message)
                said = self._sock.recv(_MESSAGE)
            self.is_there = bool(said)
        return said

    def dismiss(self) -> None:
        """Nobody asks any more: it may end."""
        self._sock.close()

    def close(self) -> None:
        """Until it has ended. Once more is as good as once."""
        self.dismiss()
        self.is_there = False
        until = time.monotonic() + PATIENCE
        while not self._buried:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
            self._buried = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            if not self._buried:
                time.sleep(0.001)


def close_all(some: Collection[Offspring]) -> None:
    for one in some:  # all are told before one is waited for
        one.dismiss()
    for one in some:
        one.close()


def _live(sock: socket.socket, answer: Callable[[bytes], bytes], keep: Collection[int], nice: int) -> None:
    """The process. Never returns: a fork must not run on into what its parent does."""
    try:
        gc.disable()  # what it has inherited stays shared
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd != sock.fileno() and fd not in keep:
                with contextlib.suppress(OSError):  # the one that lists them
                    os.close(fd)
        os.nice(nice)
        while message := sock.recv(_MESSAGE):
            try:
                said = answer(message)
            except BaseException:  # noqa: BLE001 - who asked will run into the same, and can say so
                said = b""
            if not said:
                return
            sock.send(said)
    finally:
        os._exit(0)
