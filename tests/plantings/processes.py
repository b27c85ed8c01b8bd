"""What a process is: its tracer, memory, filters, signals, scheduling."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import Any

from tests.plantings.base import Planting, alive, call, child, children, kept, libc, planting, same


@planting
def traced_by_parent() -> Planting:
    pid = child(lambda: None)
    same(libc.ptrace(0x4206, pid, 0, 0), 0)
    yield
    alive(pid)


@planting
def traced_and_stopped() -> Planting:
    pid = os.fork()
    if pid == 0:
        libc.ptrace(0, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    yield
    libc.ptrace(7, pid, 0, 0)


@planting
def vfork_in_progress() -> Planting:
    """The parent is in uninterruptible sleep until the child, which shares its memory, ends or executes."""
    code = "import ctypes, signal, os\npid = ctypes.CDLL(None).vfork()\nif pid == 0:\n    signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", code])
    while len(children(process.pid)) == 0:
        time.sleep(0.02)
    yield
    same(process.poll(), None)


@planting
def shared_memory_processes() -> Planting:
    """CLONE_VM without CLONE_THREAD: two processes, one memory."""
    stack = mmap.mmap(-1, 1 << 20)
    top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 20) - 64
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)
    pause = ctypes.cast(libc.pause, ctypes.c_void_p)
    pid = libc.clone(pause, ctypes.c_void_p(top), 0x100 | signal.SIGCHLD, None)
    same(pid > 0, True)
    kept.extend((stack, function))
    yield
    alive(pid)


@planting
def shared_descriptors_processes() -> Planting:
    pid = call(56, 0x400 | signal.SIGCHLD, 0, 0, 0, 0)  # clone(CLONE_FILES)
    if pid == 0:
        libc.prctl(1, signal.SIGKILL)
        while True:
            signal.pause()
    yield
    fd = os.open("/etc/passwd", os.O_RDONLY)
    same(os.path.exists(f"/proc/{pid}/fd/{fd}"), True)


def _filter() -> Any:
    code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))  # allow
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(code)))
    kept.extend((code, program))
    return program


@planting
def seccomp_filter() -> Planting:
    def work() -> None:
        libc.prctl(38, 1, 0, 0, 0)
        call(317, 1, 0, _filter())

    pid = child(work)
    yield
    alive(pid)
    same("Seccomp:\t2" in open(f"/proc/{pid}/status").read(), True)


@planting
def seccomp_filter_of_one_thread() -> Planting:
    gate, told = threading.Event(), threading.Event()

    def work() -> None:
        libc.prctl(38, 1, 0, 0, 0)
        call(317, 1, 0, _filter())
        told.set()
        gate.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    told.wait()
    yield
    gate.set()
    thread.join()


@planting
def seccomp_listener() -> Planting:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        libc.prctl(1, signal.SIGKILL)
        libc.prctl(38, 1, 0, 0, 0)
        fd = call(317, 1, 8, _filter())
        os.write(write, str(fd).encode())
        while True:
            signal.pause()
    os.read(read, 9)
    yield
    alive(pid)


@planting
def seccomp_strict() -> Planting:
    read, write = os.pipe()
    keep, _other = os.pipe()
    pid = os.fork()
    if pid == 0:
        libc.prctl(1, signal.SIGKILL)
        os.close(_other)
        library = ctypes.CDLL(None)
        buffer = ctypes.create_string_buffer(9)
        os.write(write, b"x")
        library.prctl(22, 1, 0, 0, 0)
        library.read(keep, buffer, 1)
        library._exit(3)
    os.read(read, 1)
    while "Seccomp:\t1" not in open(f"/proc/{pid}/status").read():
        time.sleep(0.02)
    yield
    alive(pid)


@planting
def not_dumpable() -> Planting:
    pid = child(lambda: libc.prctl(4, 0, 0, 0, 0))
    yield
    alive(pid)


@planting
def deny_write_execute() -> Planting:
    pid = child(lambda: same(libc.prctl(65, 1, 0, 0, 0), 0))  # PR_SET_MDWE
    yield
    alive(pid)


@planting
def deny_write_execute_not_inherited() -> Planting:
    pid = child(lambda: same(libc.prctl(65, 3, 0, 0, 0), 0))
    yield
    alive(pid)


@planting
def speculation_control() -> Planting:
    pid = child(lambda: libc.prctl(53, 0, 4, 0, 0))
    yield
    alive(pid)


@planting
def pending_trap() -> Planting:
    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTRAP})
        os.kill(os.getpid(), signal.SIGTRAP)

    pid = child(work)
    yield
    alive(pid)


@planting
def pending_signals() -> Planting:
    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGSEGV, signal.SIGUSR1, signal.SIGSTOP, signal.SIGTERM, 40})
        for number in (signal.SIGSEGV, signal.SIGUSR1, signal.SIGTERM, 40, 40):
            os.kill(os.getpid(), number)

    pid = child(work)
    yield
    alive(pid)


@planting
def real_time_policy() -> Planting:
    pid = child(lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)))
    yield
    same(os.sched_getscheduler(pid), os.SCHED_BATCH)


@planting
def deadline_policy() -> Planting:
    def work() -> None:
        call(314, 0, struct.pack("IIQiIQQQ", 48, 6, 0, 0, 0, 10_000_000, 100_000_000, 100_000_000), 0)

    pid = child(work)
    yield
    same(os.sched_getscheduler(pid), 6)


@planting
def stopped_child() -> Planting:
    pid = child(lambda: None)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    yield
    os.kill(pid, signal.SIGCONT)
    alive(pid)


@planting
def zombie() -> Planting:
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield
    same(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 7)


@planting
def zombie_leader_of_group() -> Planting:
    """A session whose leader is dead, with another process in it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        inner = child(lambda: libc.prctl(1, 0))
        os.write(write, str(inner).encode())
        os._exit(7)
    inner = int(os.read(read, 9))
    os.waitpid(pid, 0)
    yield
    os.kill(inner, 0)
    same(os.getsid(inner), pid)
    os.kill(inner, signal.SIGKILL)


@planting
def limits() -> Planting:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    yield
    same(resource.getrlimit(resource.RLIMIT_AS), (8 << 30, 8 << 30))


@planting
def key_ring() -> Planting:
    call(250, 1, 0)  # keyctl(KEYCTL_JOIN_SESSION_KEYRING)
    key = call(248, b"user", b"name", b"secret", 6, -3)
    yield
    buffer = ctypes.create_string_buffer(9)
    same(call(250, 11, key, buffer, 9), 6)


@planting
def landlocked() -> Planting:
    def work() -> None:
        fd = call(444, struct.pack("Q", 0x4), 8, 0)
        libc.prctl(38, 1, 0, 0, 0)
        call(446, fd, 0)
        os.close(fd)

    pid = child(work)
    yield
    alive(pid)


@planting
def cpu_timer() -> Planting:
    timer = ctypes.c_int()
    same(libc.timer_create(2, None, ctypes.byref(timer)), 0)  # CLOCK_PROCESS_CPUTIME_ID
    yield


@planting
def fifo_policy() -> Planting:
    pid = child(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(3)))
    yield
    same(os.sched_getscheduler(pid), os.SCHED_FIFO)
