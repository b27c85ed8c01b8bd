"""A process of our own that does one kind of work, where two threads would wait for each other's interpreter.

It has nothing of ours but what it is given: no lock, no terminal, no descriptor. Whatever becomes of us, its socket
ends; whatever becomes of it, killed or stopped, its work is done here.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence

PATIENCE = 1.0
SILENCE = 30.0  # seconds: each answer is the work of milliseconds


class Offspring:
    def __init__(self, work: Callable[[socket.socket], None], kept: Collection[int], nice: int = 0) -> None:
        """`work` returns when its socket ends, or when it is done. It runs in a copy of this thread alone: what other
        threads have locked at this moment stays locked there. `kept`: descriptors that it needs. OSError: the machine
        has no more processes or memory to give."""
        self.sock, theirs = socket.socketpair()
        with theirs:
            try:
                self.pid = os.fork()
            except OSError:
                self.sock.close()
                raise
            if self.pid == 0:
                _live(work, theirs, kept, nice)
        self.sock.settimeout(SILENCE)

    def hear(self) -> bytes:
        """The next byte it says. Nothing: it has ended, or is silent for so long that it was ended now, so that it does
        not come back to what somebody else is doing by then."""
        try:
            return self.sock.recv(1)
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            return b""
        except OSError:
            return b""

    def dismiss(self) -> None:
        """It may end."""
        self.sock.close()

    def close(self) -> None:
        """Until it has ended. Once."""
        self.dismiss()
        until = time.monotonic() + PATIENCE
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return
            time.sleep(0.001)


def close_all(made: Sequence[Offspring]) -> None:
    for one in made:  # all are told before one is waited for
        one.dismiss()
    for one in made:
        one.close()


def _live(work: Callable[[socket.socket], None], sock: socket.socket, kept: Collection[int], nice: int) -> None:
    """The process. Never returns."""
    try:
        gc.disable()  # what it has inherited stays shared
        _close_all_but({sock.fileno(), *kept})
        os.nice(nice)
        work(sock)
    finally:
        os._exit(0)


def _close_all_but(kept: Collection[int]) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the one we list with
                os.close(fd)
