"""Run one kind of work in a forked process, where two threads would wait for each other's interpreter lock.

The worker has only the descriptors it is given: no lock and no terminal. When this process ends for any reason, the
worker's socket closes and it exits; when the worker is killed or stopped, its caller does the work itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence

EXIT_TIMEOUT = 1.0  # seconds for a worker to exit before it is killed
ANSWER_TIMEOUT = 30.0  # seconds; each answer takes milliseconds of work


class WorkerProcess:
    """Own one worker and the socket to it."""

    def __init__(self, work: Callable[[socket.socket], None], kept: Collection[int], nice: int = 0) -> None:
        """Fork a process that runs `work` with its end of the socket, with the descriptors `kept` open.

        `work` must return when its socket ends. It runs in a copy of this thread alone: locks that other threads hold
        now stay locked there. Raise OSError if the machine has no more processes or memory.
        """
        self.sock, theirs = socket.socketpair()
        with theirs:
            try:
                self.pid = os.fork()
            except OSError:
                self.sock.close()
                raise
            if self.pid == 0:
                _live(work, theirs, kept, nice)
        self.sock.settimeout(ANSWER_TIMEOUT)

    def hear(self) -> bytes:
        """Return the next byte the worker sends. Return no byte if it has ended, or was silent for ANSWER_TIMEOUT: it
        is then killed, so that it cannot resume work that the caller now does itself."""
        try:
            return self.sock.recv(1)
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            return b""
        except OSError:
            return b""

    def dismiss(self) -> None:
        """Close the socket: the worker then exits."""
        self.sock.close()

    def close(self) -> None:
        """Close the socket and wait until the worker has exited; kill it after EXIT_TIMEOUT. Call this once."""
        self.dismiss()
        until = time.monotonic() + EXIT_TIMEOUT
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return
            time.sleep(0.001)


def close_all(workers: Sequence[WorkerProcess]) -> None:
    """Close all workers: every one begins to exit before the first is waited for."""
    for worker in workers:
        worker.dismiss()
    for worker in workers:
        worker.close()


def _live(work: Callable[[socket.socket], None], sock: socket.socket, kept: Collection[int], nice: int) -> None:
    """Run `work` in the forked process, then exit. Never return."""
    try:
        gc.disable()  # keeps the inherited pages shared
        _close_all_but({sock.fileno(), *kept})
        os.nice(nice)
        work(sock)
    finally:
        os._exit(0)


def _close_all_but(kept: Collection[int]) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing
                os.close(fd)
