"""Run a program on a terminal, as a person would: for `attach`, vim and the like."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tests.support.patience import bound


class Pty:
    """Run `command` on a new terminal. Everything it printed is in `seen`."""

    def __init__(self, command: Sequence[str], env: dict[str, str], rows: int = 24, cols: int = 80) -> None:
        self.master, slave = pty.openpty()
        self.slave = slave  # kept open, so that the terminal can be looked at when the program is gone
        self.resize(rows, cols)
        self.before = termios.tcgetattr(slave)
        self.seen = bytearray()

        def own_terminal() -> None:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command, env=env, stdin=slave, stdout=slave, stderr=slave, preexec_fn=own_terminal, cwd="/"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, text: str | bytes) -> None:
        os.write(self.master, text.encode() if isinstance(text, str) else text)

    def pump(self, seconds: float = 0.0) -> bytes:
        """Read what arrives within `seconds`, or is there already."""
        got = bytearray()
        end = time.monotonic() + seconds
        while select.select([self.master], [], [], max(0.0, end - time.monotonic()))[0]:
            got += os.read(self.master, 65536)
        self.seen += got
        return bytes(got)

    def expect(self, text: bytes, within: float = 15.0, after: int = 0) -> int:
        """Wait for `text` in `seen`, searching from `after`; return the position after it."""
        end = time.monotonic() + bound(within)
        while (at := self.seen.find(text, after)) < 0:
            assert time.monotonic() < end, f"no {text!r} in {bytes(self.seen[after:][-2000:])!r}"
            self.pump(0.05)
        return at + len(text)

    def wait(self, within: float = 15.0) -> int:
        end = time.monotonic() + bound(within)
        while self.process.poll() is None:
            assert time.monotonic() < end, f"still running: {bytes(self.seen[-500:])!r}"
            self.pump(0.05)
        self.pump()
        return self.process.returncode

    def is_sane(self) -> bool:
        return termios.tcgetattr(self.slave) == self.before
