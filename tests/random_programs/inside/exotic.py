"""Hold what CRIU cannot carry: the plan has to refuse each of these."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct

from base import LIBC, Holding, call, make, syscall

PTRACE_SEIZE = 0x4206
CLONE_NEWTIME, CLONE_NEWUSER, CLONE_NEWPID = 0x80, 0x10000000, 0x20000000


def sleep_for_ever() -> None:
    while True:
        signal.pause()


class IoUring(Holding):
    def build(self) -> None:
        self.fd = syscall(425, 8, ctypes.create_string_buffer(120))


class Perf(Holding):
    def build(self) -> None:
        # PERF_TYPE_SOFTWARE, size, PERF_COUNT_SW_TASK_CLOCK
        self.attributes = ctypes.create_string_buffer(struct.pack("IIQ", 1, 128, 1).ljust(128, b"\0"), 128)
        self.fd = syscall(298, self.attributes, 0, -1, -1, 0)


class Bpf(Holding):
    def build(self) -> None:
        # BPF_MAP_TYPE_RINGBUF, with neither key nor value
        self.attributes = ctypes.create_string_buffer(struct.pack("IIII", 27, 0, 0, 4096).ljust(128, b"\0"), 128)
        self.fd = syscall(321, 0, self.attributes, 128)


class Userfault(Holding):
    def build(self) -> None:
        self.fd = syscall(323, os.O_NONBLOCK | 1)


class MessageQueue(Holding):
    def build(self) -> None:
        name = os.path.basename(self.place).encode()
        self.fd = syscall(240, name, os.O_RDWR | os.O_CREAT, 0o600, None)


class SecretMemory(Holding):
    def build(self) -> None:
        self.fd = syscall(447, 0)
        os.ftruncate(self.fd, 4096)


class _Namespace(Holding):
    flag = 0
    fork = True

    def build(self) -> None:
        out, into = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            call("unshare", self.flag)
            if self.fork:
                os.fork()
            os.write(into, b"x")
            sleep_for_ever()
        os.read(out, 1)
        os.close(out)
        os.close(into)


class PidNamespace(_Namespace):
    flag = CLONE_NEWPID


class UserNamespace(_Namespace):
    flag = CLONE_NEWUSER
    fork = False


class TimeNamespace(_Namespace):
    flag = CLONE_NEWTIME


class Traced(Holding):
    def build(self) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            sleep_for_ever()
        LIBC.ptrace.argtypes = [ctypes.c_long] * 4
        call("ptrace", PTRACE_SEIZE, self.pid, 0, 0)


class Vsock(Holding):
    def build(self) -> None:
        self.socket = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM, 0)


class Mptcp(Holding):
    def build(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)


class Device(Holding):
    def build(self) -> None:
        os.mknod(self.path("fuse"), 0o20600, os.makedev(10, 229))
        self.fd = os.open(self.path("fuse"), os.O_RDWR)
        os.unlink(self.path("fuse"))


class MemfdProgram(Holding):
    """A program that is executed from a memfd."""

    def build(self) -> None:
        fd = os.memfd_create("program")
        with open("/bin/sleep", "rb") as file:
            os.write(fd, file.read())
        self.pid = os.posix_spawn(f"/proc/self/fd/{fd}", ["sleep", "3000"], dict(os.environ))
        os.close(fd)


class DeletedWatch(Holding):
    """A watch on a file that is deleted, and still open."""

    def build(self) -> None:
        where = make(self.path("watched"), b"x")
        self.kept = os.open(where, os.O_RDONLY)
        self.fd = call("inotify_init1", os.O_NONBLOCK)
        call("inotify_add_watch", self.fd, where.encode(), 0x2)
        os.unlink(where)
