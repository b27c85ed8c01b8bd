"""A client in a real PTY."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping

from demo_place import Trouble

PATIENCE = 10.0
_DETACHED = re.compile(rb"\[detached from \S+ at byte (\d+);")


class Terminal:
    """Runs argv on a terminal of its own; everything that terminal shows is in `seen`."""

    def __init__(self, argv: list[str], environment: Mapping[str, str]) -> None:
        self.seen = b""
        self._began = time.monotonic()
        self._first: float | None = None
        # Our own end of the slave stays open: its settings can be read when the client is gone.
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._before = termios.tcgetattr(self._slave)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.login_tty(self._slave)
                os.close(self._master)
                os.execve(argv[0], argv, dict(environment))
            finally:
                os._exit(127)

    def __del__(self) -> None:
        os.close(self._master)
        os.close(self._slave)

    def watch(self, seconds: float, show: Callable[[str], None]) -> None:
        """`seconds` of the session, counted from its first output; each full line goes to `show`."""
        until = time.monotonic() + PATIENCE
        lines = 0
        while time.monotonic() < until:
            if self._read(0.05):
                if self._first is None:
                    self._first = time.monotonic()
                    until = self._first + seconds
                complete = self.seen.split(b"\r\n")[:-1]
                for line in complete[lines:]:
                    show(line.decode())
                lines = len(complete)
        if self._first is None:
            raise Trouble("the client showed nothing")

    def first_byte(self) -> float:
        return (self._first or self._began) - self._began

    def type(self, data: bytes) -> None:
        os.write(self._master, data)

    def kill(self) -> None:
        """As when a person's machine goes: nothing of the client's own can run any more."""
        os.kill(self.pid, signal.SIGKILL)
        self.finish()
        until = time.monotonic() + PATIENCE
        while not (self.is_sane() and self.seen.endswith(b"\r\r\n")) and time.monotonic() < until:
            self._read(0.05)

    def finish(self) -> None:
        """Wait until the client, and the process that resets the terminal after it, are gone."""
        os.waitpid(self.pid, 0)
        while self._read(0.25):
            pass

    def is_sane(self) -> bool:
        return termios.tcgetattr(self._slave) == self._before

    def session_bytes(self, begin: int) -> bytes:
        """What the session printed, of what was seen by a client that detached: it says itself where that ends."""
        said = _DETACHED.search(self.seen)
        if said is None:
            raise Trouble(f"the client did not say where it detached: {self.seen[-200:]!r}")
        return self.seen[: int(said[1]) - begin]

    def _read(self, timeout: float) -> bool:
        if not select.select([self._master], [], [], timeout)[0]:
            return False
        self.seen += os.read(self._master, 65536)
        return True
