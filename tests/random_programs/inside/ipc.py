"""Hold pipes, event descriptors, timers, epoll sets, process descriptors and System V objects."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
import time

from base import LIBC, Holding, call, digest, same

LIBC.tee.restype = ctypes.c_ssize_t
LIBC.tee.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint]
SETPIPE_SZ, GETPIPE_SZ = 1031, 1032
FIONREAD = 0x541B


def queued(fd: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(fd, FIONREAD, b"\0" * 4))[0])


def peek(fd: int) -> bytes:
    """Read what is in a pipe, and leave it there."""
    out, into = os.pipe2(os.O_NONBLOCK)
    fcntl.fcntl(into, SETPIPE_SZ, 1 << 20)
    found = LIBC.tee(fd, into, 1 << 20, 2) if queued(fd) else 0
    data = os.read(out, 1 << 20) if found > 0 else b""
    os.close(out)
    os.close(into)
    return data


class Pipe(Holding):
    """A pipe with data in it; children share it."""

    flags = 0

    def build(self) -> None:
        self.fd, self.into = self.open()
        self.text = self.data(self.rng.choice([0, 5, 4096, 60_000]))
        if self.text:
            os.write(self.into, self.text)

    def open(self) -> tuple[int, int]:
        out, into = os.pipe2(os.O_NONBLOCK | self.flags)
        if self.rng.random() < 0.5:
            fcntl.fcntl(into, SETPIPE_SZ, 1 << 18)
        return out, into

    def report(self) -> object:
        return [digest(peek(self.fd)), fcntl.fcntl(self.fd, GETPIPE_SZ), fcntl.fcntl(self.fd, fcntl.F_GETFL)]

    def use(self) -> None:
        found = os.read(self.fd, 1 << 20) if queued(self.fd) else b""
        same(digest(found), digest(self.text), "what was in the pipe")
        os.write(self.into, b"new")

    def check(self) -> None:
        same(peek(self.fd), b"new", "what is in the pipe now")


class PipePackets(Pipe):
    """A pipe in packet mode (O_DIRECT): reads end where writes did."""

    flags = os.O_DIRECT

    def build(self) -> None:
        self.fd, self.into = self.open()
        self.text = self.data(9)
        os.write(self.into, self.text[:4])
        os.write(self.into, self.text[4:])

    def use(self) -> None:
        same(os.read(self.fd, 99), self.text[:4], "the first packet")
        same(os.read(self.fd, 99), self.text[4:], "the second packet")
        os.write(self.into, b"new")


class PipeEnded(Holding):
    """A pipe whose write end is closed, with its last data."""

    def build(self) -> None:
        self.fd, into = os.pipe()
        self.text = self.data(300)
        os.write(into, self.text)
        os.close(into)

    def report(self) -> object:
        return digest(peek(self.fd))

    def use(self) -> None:
        same(os.read(self.fd, 999), self.text, "what was in the pipe")
        same(os.read(self.fd, 999), b"", "its end")


class Fifo(Pipe):
    """A named pipe."""

    def open(self) -> tuple[int, int]:
        where = self.path("fifo")
        os.mkfifo(where)
        out = os.open(where, os.O_RDONLY | os.O_NONBLOCK)
        into = os.open(where, os.O_WRONLY | os.O_NONBLOCK)
        if type(self) is FifoDeleted:
            os.unlink(where)
        return out, into


class FifoDeleted(Fifo):
    pass


class Eventfd(Holding):
    def build(self) -> None:
        self.value = self.rng.choice([0, 1, 1 << 40])
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        if self.value:
            os.eventfd_write(self.fd, self.value)

    def report(self) -> object:
        with open(f"/proc/self/fdinfo/{self.fd}") as info:
            return [line for line in info.read().splitlines() if line.startswith("eventfd-count")]

    def use(self) -> None:
        os.eventfd_write(self.fd, 2)

    def check(self) -> None:
        if os.getpid() == self.owner:
            same(os.eventfd_read(self.fd), self.value + 2, "the eventfd's value")


class Timerfd(Holding):
    """A timer that runs out long after the test, or one that is not set."""

    def build(self) -> None:
        self.clock = self.rng.choice([time.CLOCK_MONOTONIC, time.CLOCK_REALTIME, time.CLOCK_BOOTTIME])
        self.fd = call("timerfd_create", self.clock, os.O_NONBLOCK)
        self.seconds = self.rng.choice([0, 3000])
        absolute = self.rng.choice([0, 1])
        first = self.seconds + int(time.clock_gettime(self.clock)) * absolute if self.seconds else 0
        call("timerfd_settime", self.fd, absolute, struct.pack("qqqq", 7, 0, first, 0), None)

    def report(self) -> object:
        found = ctypes.create_string_buffer(32)
        call("timerfd_gettime", self.fd, found)
        interval, _, left, _ = struct.unpack("qqqq", found.raw)
        return [interval, "runs" if 2000 < left <= 3000 else left]

    def use(self) -> None:
        call("timerfd_settime", self.fd, 0, struct.pack("qqqq", 0, 0, 0, 1_000_000), None)

    def check(self) -> None:
        if os.getpid() == self.owner:
            same(bool(select.select([self.fd], [], [], 10)[0]), True, "the timer fires")


class Signalfd(Holding):
    """A signalfd with a signal pending for it."""

    def build(self) -> None:
        self.signal = signal.SIGRTMIN + 3
        signal.pthread_sigmask(signal.SIG_BLOCK, {self.signal})
        self.fd = call("signalfd", -1, (ctypes.c_uint64 * 16)(1 << (self.signal - 1)), os.O_NONBLOCK)
        os.kill(os.getpid(), self.signal)

    def report(self) -> object:
        return bool(select.select([self.fd], [], [], 0)[0])

    def check(self) -> None:
        if os.getpid() == self.owner:
            same(struct.unpack("I", os.read(self.fd, 128)[:4])[0], self.signal, "the pending signal")


class Epoll(Holding):
    """An epoll set in an epoll set."""

    def build(self) -> None:
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        self.out, self.into = os.pipe()
        self.inner, self.outer = select.epoll(), select.epoll()
        self.inner.register(self.event, select.EPOLLIN | self.rng.choice([0, select.EPOLLET, select.EPOLLONESHOT]))
        self.inner.register(self.out, select.EPOLLIN)
        self.outer.register(self.inner.fileno(), select.EPOLLIN)

    def report(self) -> object:
        return [fd for fd, _ in self.outer.poll(0)]

    def use(self) -> None:
        os.eventfd_write(self.event, 1)
        os.write(self.into, b"x")

    def check(self) -> None:
        if os.getpid() == self.owner:
            same([fd for fd, _ in self.outer.poll(5)], [self.inner.fileno()], "the outer epoll set")
            same(sorted(fd for fd, _ in self.inner.poll(5)), sorted([self.event, self.out]), "the inner epoll set")


class EpollMoved(Holding):
    """An epoll set that watches a description under a number that is closed, while a duplicate is open."""

    def build(self) -> None:
        self.out, self.into = os.pipe()
        self.set = select.epoll()
        number = os.dup(self.out)
        self.set.register(number, select.EPOLLIN)
        os.close(number)
        self.number = number

    def use(self) -> None:
        os.write(self.into, b"x")

    def check(self) -> None:
        if os.getpid() == self.owner:
            same([fd for fd, _ in self.set.poll(5)], [self.number], "the epoll set")


class Pidfd(Holding):
    def build(self) -> None:
        self.fd = os.pidfd_open(self.rng.choice([1, os.getpid(), os.getppid() or 1]))

    def report(self) -> object:
        with open(f"/proc/self/fdinfo/{self.fd}") as info:
            return [line for line in info.read().splitlines() if line.startswith("NSpid")]


class SystemV(Holding):
    """A semaphore set and a message queue."""

    def build(self) -> None:
        self.semaphore = call("semget", self.rng.randrange(1, 1 << 30), 3, 0o1600)
        call("semctl", self.semaphore, 1, 16, 42)
        self.queue = call("msgget", self.rng.randrange(1, 1 << 30), 0o1600)
        self.text = self.data(20)
        call("msgsnd", self.queue, struct.pack("q", 5) + self.text, len(self.text), 0)

    def report(self) -> object:
        return [self.semaphore, self.queue, call("semctl", self.semaphore, 1, 12, 0)]

    def use(self) -> None:
        buffer = ctypes.create_string_buffer(64)
        same(call("msgrcv", self.queue, buffer, 32, 5, 0o4000), len(self.text), "the message's length")
        same(buffer.raw[8 : 8 + len(self.text)], self.text, "the message")


class HighNumbers(Holding):
    """A descriptor table with holes: low and high numbers."""

    def build(self) -> None:
        low = os.open("/dev/null", os.O_RDONLY)
        self.high = self.rng.choice([100, 255, 1000])
        self.high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, self.high)

    def report(self) -> object:
        return [self.high, fcntl.fcntl(self.high, fcntl.F_GETFD)]
