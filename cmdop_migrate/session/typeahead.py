"""Input a session has been given but has not read: CRIU does not see it, so we carry it.

It waits in the line discipline of the terminal's slave side. Read while the
session is frozen, put back before it runs again, without the echo it had.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import time

_SLAVE = "/proc/{pid}/root/dev/pts/0"
LIMIT = 64 << 10


def take(pid: int) -> bytes:
    """What process `pid`'s session would read next from its terminal; it is gone from there afterwards."""
    slave = os.open(_SLAVE.format(pid=pid), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        before = termios.tcgetattr(slave)
        plain = [*before]
        plain[6] = [*before[6]]
        plain[0] &= ~(termios.IXON | termios.ICRNL | termios.INLCR | termios.IGNCR)
        plain[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
        plain[6][termios.VMIN], plain[6][termios.VTIME] = 0, 0
        # NOW, not FLUSH: half a line counts too, and becomes readable when lines stop mattering.
        termios.tcsetattr(slave, termios.TCSANOW, plain)
        try:
            return _drain(slave)
        finally:
            termios.tcsetattr(slave, termios.TCSANOW, before)
    finally:
        os.close(slave)


def _drain(slave: int) -> bytes:
    data = b""
    while len(data) < LIMIT:
        try:
            part = os.read(slave, 4096)
        except BlockingIOError:
            break
        if not part:
            break
        data += part
    # Stored as the reader would have got it: a newline was a return when it was typed.
    return data.replace(b"\n", b"\r")


def give(pid: int, master: int, data: bytes) -> None:
    """Types `data` again, unseen, and waits until the terminal has it, so that nothing overtakes it."""
    if not data:
        return
    before = termios.tcgetattr(master)
    silent = [*before]
    silent[3] &= ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(master, termios.TCSANOW, silent)
    try:
        os.write(master, data)
        slave = os.open(_SLAVE.format(pid=pid), os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            until = time.monotonic() + 0.2
            while _waiting(slave) < len(data) and time.monotonic() < until:
                time.sleep(0.001)
        finally:
            os.close(slave)
    finally:
        termios.tcsetattr(master, termios.TCSANOW, before)


def _waiting(slave: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(slave, termios.FIONREAD, b"\0" * 4))[0])
