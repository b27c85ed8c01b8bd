"""Read and write the master side of a session's terminal, without ever blocking on it."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
import time

from cmdop_migrate.holder.clients import Clients
from cmdop_migrate.holder.idle import Idle
from cmdop_migrate.holder.input_queue import Inputs
from cmdop_migrate.holder.output_ring import Ring

READ_SIZE = 64 << 10


class Terminal:
    """Move output from the terminal into the ring, and waiting input into the terminal."""

    def __init__(self, epoll: select.epoll, ring: Ring, inputs: Inputs, clients: Clients, idle: Idle) -> None:
        self._epoll, self._ring, self._inputs, self._clients, self._idle = epoll, ring, inputs, clients, idle
        self.master = -1
        self.printed_at = 0.0  # CLOCK_BOOTTIME
        self.first_output: float | None = None  # CLOCK_BOOTTIME; of this incarnation
        self.unread = b""  # input taken out of the terminal while the session is frozen

    def open(self, master: int) -> None:
        """Use `master` from now on."""
        self.master = master
        os.set_blocking(master, False)
        self._epoll.register(master, select.EPOLLIN)

    def set_size(self, rows: int, cols: int) -> None:
        """Set the size in characters; one that makes no sense is ignored."""
        if 0 < rows < 4096 and 0 < cols < 4096:
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def size(self) -> tuple[int, int]:
        """Return rows and columns."""
        rows, cols, _, _ = struct.unpack("HHHH", fcntl.ioctl(self.master, termios.TIOCGWINSZ, b"\0" * 8))
        return rows, cols

    def on_readable(self) -> None:
        """Read once; at the end of the output, stop polling."""
        if not self.read():
            self._epoll.unregister(self.master)  # the slave side is closed; SIGCHLD tells when the session has ended

    def read(self) -> bool:
        """Read what the session printed, whether or not a client follows it. Return False at the end of the output."""
        try:
            data = os.read(self.master, READ_SIZE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._ring.append(data)
        self._idle.touch()
        self.printed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self.first_output is None:
            self.first_output = self.printed_at
        self._clients.pump_all()
        return bool(data)

    def read_all(self) -> None:
        """Read everything that the session has printed so far."""
        before = -1
        while before < self._ring.end:
            before = self._ring.end
            if not self.read():
                return

    def feed(self) -> None:
        """Write the waiting input that the terminal has room for."""
        self._inputs.flush(self.master)
        try:
            self._epoll.modify(self.master, select.EPOLLIN | (select.EPOLLOUT if self._inputs.waiting else 0))
        except OSError:
            return  # unregistered already: the session is ending
        if self._inputs.is_empty:
            self._clients.unblock()
