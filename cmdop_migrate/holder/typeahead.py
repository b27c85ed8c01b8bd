"""Carry input that a session was given but has not read: CRIU does not see it.

It waits in the line discipline of the terminal's slave side, already edited (a
return is a newline there, an erased character is gone). It is read while the
session is frozen, as its reader would, and written back before the session runs
again, unedited and without echo.

In what is carried, an end of file (^D) is NUL followed by e, and a NUL is two.
"""

from __future__ import annotations

import os
import select
import termios
import time
from typing import Any

_SLAVE = "/proc/{pid}/root/dev/pts/0"
LIMIT = 256 << 10
Attributes = list[Any]  # as termios returns them
_ESCAPE, _EOF = b"\x00", b"\x00e"
_DISABLED = b"\0"
_IN = termios.IGNBRK | termios.BRKINT | termios.PARMRK | termios.ISTRIP | termios.INLCR | termios.IGNCR
_IN |= termios.ICRNL | termios.IXON | termios.IXOFF | termios.IXANY | termios.IUCLC
_LOCAL = termios.ISIG | termios.ECHO | termios.ECHOE | termios.ECHOK | termios.ECHONL | termios.IEXTEN


def take(pid: int) -> bytes:
    """Return and remove what the session of process `pid` would read next from its terminal."""
    slave = _open(pid)
    try:
        before = termios.tcgetattr(slave)
        data = b"".join(_lines(slave) if before[3] & termios.ICANON else _bytes(slave))
        if before[3] & termios.ICANON:
            # NOW, not FLUSH: half a line counts too, and becomes readable when line mode is off.
            termios.tcsetattr(slave, termios.TCSANOW, _with(before, local=before[3] & ~termios.ICANON))
            try:
                data += b"".join(_bytes(slave))
            finally:
                termios.tcsetattr(slave, termios.TCSANOW, before)
        return data
    finally:
        os.close(slave)


def _open(pid: int) -> int:
    return os.open(_SLAVE.format(pid=pid), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)


def _bytes(slave: int) -> list[bytes]:
    """Read until nothing is left. A read that finds nothing has made the kernel pass on all that was in transit."""
    parts: list[bytes] = []
    while sum(map(len, parts)) < LIMIT:
        try:
            part = os.read(slave, 4096)
        except BlockingIOError:
            break
        if not part:
            break
        parts.append(part.replace(_ESCAPE, _ESCAPE * 2))
    return parts


def _lines(slave: int) -> list[bytes]:
    parts: list[bytes] = []
    while sum(map(len, parts)) < LIMIT:
        try:
            line = os.read(slave, 4096)
        except BlockingIOError:
            break
        parts.append(line.replace(_ESCAPE, _ESCAPE * 2) + (b"" if line.endswith(b"\n") else _EOF))
    return parts


def give(pid: int, master: int, data: bytes) -> None:
    """Type `data` again, without echo and unedited, and wait until the terminal has it, so that no other input
    overtakes it."""
    if not data:
        return
    slave = _open(pid)
    try:
        before: Attributes = termios.tcgetattr(slave)
        raw, end = _unescaped(data)
        keys: list[Any] = [_DISABLED] * len(before[6])
        keys[termios.VEOF] = bytes([end])
        if not before[3] & termios.ICANON:
            keys[termios.VMIN], keys[termios.VTIME] = before[6][termios.VMIN], before[6][termios.VTIME]
        plain = _with(before, before[0] & ~_IN, before[3] & ~_LOCAL, keys)
        termios.tcsetattr(slave, termios.TCSANOW, plain)
        try:
            _write(master, slave, raw)
        finally:
            termios.tcsetattr(slave, termios.TCSANOW, before)
    finally:
        os.close(slave)


def _write(master: int, slave: int, data: bytes) -> None:
    until = time.monotonic() + 2.0
    while data and time.monotonic() < until:
        try:
            data = data[os.write(master, data[:1024]) :]
        except BlockingIOError:
            time.sleep(0.001)
        # Polled for reading, a terminal first processes all that was written to it.
        select.select([slave], [], [], 0)


def _unescaped(data: bytes) -> tuple[bytes, int]:
    """Return what to write, and the byte in it that stands for the end of file: one that does not occur otherwise."""
    literal = data.replace(_ESCAPE * 2, b"")
    end = next((byte for byte in range(1, 256) if byte not in literal and byte != 0x0A), 4)
    raw, at = bytearray(), 0
    while at < len(data):
        if data[at : at + 2] == _EOF:
            raw.append(end)
            at += 2
        else:
            raw.append(data[at])
            at += 2 if data[at : at + 1] == _ESCAPE else 1
    return bytes(raw), end


def _with(before: Attributes, inputs: int | None = None, local: int | None = None, keys: Any = None) -> Attributes:
    changed = [*before]
    for place, value in ((0, inputs), (3, local), (6, keys)):
        if value is not None:
            changed[place] = value
    return changed
