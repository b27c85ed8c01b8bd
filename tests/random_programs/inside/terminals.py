"""Hold terminals: pairs of our own, and further descriptors of the process's terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios

from base import Holding, digest, same

WINDOW = struct.Struct("HHHH")


def modes(fd: int) -> list[object]:
    found = termios.tcgetattr(fd)
    return [*found[:6], [one.hex() if isinstance(one, bytes) else one for one in found[6]]]


def window(fd: int) -> list[int]:
    return list(WINDOW.unpack(fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8))))


def read_for(fd: int, size: int) -> bytes:
    found = b""
    while len(found) < size and select.select([fd], [], [], 5)[0]:
        found += os.read(fd, size - len(found))
    return found


class PtyPair(Holding):
    """A pair with modes and a size of its own, and data on its way in, out, or both."""

    def build(self) -> None:
        self.master, self.slave = pty.openpty()
        changed = termios.tcgetattr(self.slave)
        changed[3] &= ~termios.ECHO
        if self.rng.random() < 0.5:
            changed[3] &= ~termios.ICANON
        changed[1] &= ~termios.OPOST
        changed[6][termios.VMIN] = self.rng.choice([b"\x01", b"\x04"])
        termios.tcsetattr(self.slave, termios.TCSANOW, changed)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, WINDOW.pack(self.rng.randrange(9, 99), 77, 0, 0))
        self.typed = b"typed\n" if self.rng.random() < self.queued else b""
        self.printed = b"printed" if self.rng.random() < self.queued else b""
        os.write(self.master, self.typed)
        os.write(self.slave, self.printed)

    queued = 0.0

    def report(self) -> object:
        return [modes(self.slave), window(self.slave), os.ttyname(self.slave)]

    def use(self) -> None:
        same(read_for(self.slave, len(self.typed)), self.typed, "what was typed")
        same(read_for(self.master, len(self.printed)), self.printed, "what was printed")
        os.write(self.master, b"line\n")
        os.write(self.slave, b"answer")

    def check(self) -> None:
        if os.getpid() == self.owner:
            same((read_for(self.slave, 5), read_for(self.master, 6)), (b"line\n", b"answer"), "new data")


class PtyQueued(PtyPair):
    queued = 0.7


class PtyMasterOnly(Holding):
    """A master whose slave was never opened, or is closed."""

    def build(self) -> None:
        self.master, slave = pty.openpty()
        self.name = os.ttyname(slave)
        os.close(slave)

    def report(self) -> object:
        return [window(self.master), self.name]

    def use(self) -> None:
        slave = os.open(self.name, os.O_RDWR | os.O_NOCTTY)
        os.write(self.master, b"line\n")
        same(read_for(slave, 5), b"line\n", "a line for the slave, opened anew")


class PtySlaveOnly(Holding):
    """A terminal that hung up: its master is closed."""

    def build(self) -> None:
        master, self.slave = pty.openpty()
        os.close(master)

    def report(self) -> object:
        return select.select([self.slave], [], [], 0)[0] == [self.slave]

    def use(self) -> None:
        same(os.read(self.slave, 9), b"", "the end of a terminal that hung up")


class _Own(Holding):
    """Another descriptor of the process's own terminal."""

    fd = -1

    def report(self) -> object:
        try:
            # The foreground group is seen from outside, before what is stopped is continued by changing it.
            return [self.named(), os.tcgetpgrp(self.fd) > 0, digest(repr(modes(self.fd)).encode())]
        except OSError as error:  # children in a session of their own hold it, too
            return error.strerror

    def named(self) -> str:
        return os.ttyname(self.fd)


class DevTty(_Own):
    def named(self) -> str:
        return ""  # it is another after a restore: /dev/pts/N, of the same terminal

    def build(self) -> None:
        self.fd = os.open("/dev/tty", os.O_RDWR)


class OwnTtyAgain(_Own):
    def build(self) -> None:
        self.fd = os.open(os.ttyname(0), os.O_RDWR | self.rng.choice([0, os.O_NOCTTY, os.O_NONBLOCK]))
