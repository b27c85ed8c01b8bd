"""Programs that are executed in unusual ways, and threads."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import sys
import threading
import time

from tests.plantings.base import Planting, alive, call, child, libc, planting, same, unshare, until_executed


def _exec_memfd(path: str = "/bin/sleep") -> subprocess.Popen[bytes]:
    fd = os.memfd_create("program", 0)
    with open(path, "rb") as file:
        os.write(fd, file.read())
    return subprocess.Popen(["program", "1000"], executable=f"/proc/self/fd/{fd}", pass_fds=(fd,))


@planting
def memfd_program() -> Planting:
    process = _exec_memfd()
    until_executed(process.pid)
    yield
    same(process.poll(), None)


@planting
def memfd_program_closed() -> Planting:
    """As a loader does it: the descriptor is closed on exec."""
    fd = os.memfd_create("program", os.MFD_CLOEXEC)
    with open("/bin/sleep", "rb") as file:
        os.write(fd, file.read())
    pid = os.fork()
    if pid == 0:
        libc.prctl(1, signal.SIGKILL)
        os.execve(fd, ["program", "1000"], os.environ)
    os.close(fd)
    until_executed(pid)
    yield
    alive(pid)


@planting
def memfd_library() -> Planting:
    """A library mapped from a memfd: code that was never in a file."""
    fd = os.memfd_create("library", os.MFD_CLOEXEC)
    found = next(line.split()[-1] for line in open("/proc/self/maps") if "libc.so" in line)
    with open(found, "rb") as file:
        os.write(fd, file.read())
    library = ctypes.CDLL(f"/proc/self/fd/{fd}")
    os.close(fd)
    yield
    same(library.abs(-5), 5)


@planting
def deleted_program() -> Planting:
    subprocess.run(["cp", "/bin/sleep", "/root/tool"], check=True)
    process = subprocess.Popen(["/root/tool", "1000"])
    until_executed(process.pid)
    os.unlink("/root/tool")
    yield
    same(process.poll(), None)


@planting
def thread_with_own_descriptors() -> Planting:
    gate, told = threading.Event(), threading.Event()

    def work() -> None:
        unshare(0x400)
        told.set()
        gate.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    told.wait()
    yield
    gate.set()
    thread.join()


@planting
def thread_with_own_credentials() -> Planting:
    gate, told = threading.Event(), threading.Event()
    seen: list[str] = []

    def work() -> None:
        call(122, 1000)  # setfsuid, of this thread alone
        told.set()
        gate.wait()
        seen.extend(line.split()[4] for line in open("/proc/thread-self/status") if line.startswith("Uid"))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    told.wait()
    yield
    gate.set()
    thread.join()
    same(seen, ["1000"])


@planting
def dead_leader_thread() -> Planting:
    """The first thread has ended, another one lives."""
    code = """
import ctypes, threading, time
threading.Thread(target=lambda: time.sleep(1000)).start()
ctypes.CDLL(None).syscall(60, 0)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    while "Z" not in open(f"/proc/{process.pid}/task/{process.pid}/stat").read().rpartition(")")[2]:
        time.sleep(0.02)
    yield
    same(os.path.exists(f"/proc/{process.pid}"), True)
    same(len(os.listdir(f"/proc/{process.pid}/task")), 2)
    process.kill()


# A program that makes i386 system calls: pause(), in an endless loop.
_PAUSE = bytes.fromhex("b81d000000cd80ebf7")


def _elf32() -> bytes:
    entry = 0x08048000 + 84
    size = 84 + len(_PAUSE)
    header = b"\x7fELF\1\1\1" + bytes(9) + struct.pack("<HHIIIIIHHHHHH", 2, 3, 1, entry, 52, 0, 0, 52, 32, 1, 0, 0, 0)
    return header + struct.pack("<IIIIIIII", 1, 0, 0x08048000, 0x08048000, size, size, 5, 4096) + _PAUSE


@planting
def program_of_32_bits() -> Planting:
    with open("/root/small", "wb") as file:
        file.write(_elf32())
    os.chmod("/root/small", 0o755)
    process = subprocess.Popen(["/root/small"])
    until_executed(process.pid)
    yield
    same(process.poll(), None)


@planting
def pending_trap_of_thread() -> Planting:
    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTRAP})
        signal.pthread_kill(threading.get_ident(), signal.SIGTRAP)

    pid = child(work)
    yield
    alive(pid)
