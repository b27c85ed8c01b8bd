"""Open files, directories, locks, and what is in /proc."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import threading
import time

from tests.plantings.base import Planting, alive, child, libc, planting, same


@planting
def sparse_deleted_file() -> Planting:
    fd = os.open("/root/sparse", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"start", 0)
    os.pwrite(fd, b"end", 3 << 30)
    os.unlink("/root/sparse")
    yield
    same((os.fstat(fd).st_size, os.pread(fd, 5, 0), os.pread(fd, 9, 3 << 30)), ((3 << 30) + 3, b"start", b"end"))
    same(os.fstat(fd).st_blocks < 1000, True)


@planting
def large_deleted_file() -> Planting:
    fd = os.open("/root/large", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 300 << 20)
    os.unlink("/root/large")
    yield
    same(os.fstat(fd).st_size, 300 << 20)


@planting
def sparse_deleted_tmpfs_file() -> Planting:
    fd = os.open("/dev/shm/sparse", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"start", 0)
    os.pwrite(fd, b"end", 1 << 30)
    os.unlink("/dev/shm/sparse")
    yield
    same((os.fstat(fd).st_size, os.pread(fd, 5, 0), os.pread(fd, 9, 1 << 30)), ((1 << 30) + 3, b"start", b"end"))


@planting
def unnamed_file() -> Planting:
    fd = os.open("/root", os.O_RDWR | os.O_TMPFILE, 0o600)
    os.write(fd, b"never had a name")
    yield
    same(os.pread(fd, 99, 0), b"never had a name")


@planting
def path_descriptor() -> Planting:
    fd = os.open("/etc/passwd", os.O_PATH)
    folder = os.open("/etc", os.O_PATH)
    yield
    same(os.fstat(fd).st_ino, os.stat("/etc/passwd").st_ino)
    same(os.stat("passwd", dir_fd=folder).st_ino, os.stat("/etc/passwd").st_ino)


@planting
def path_descriptor_of_link() -> Planting:
    os.symlink("nowhere", "/root/link")
    fd = os.open("/root/link", os.O_PATH | os.O_NOFOLLOW)
    yield
    same(os.readlink("", dir_fd=fd), "nowhere")


@planting
def proc_file_of_itself() -> Planting:
    fds = [os.open(f"/proc/self/{name}", os.O_RDONLY) for name in ("stat", "maps", "fd", "task", "ns/net")]
    yield
    same(os.read(fds[0], 9).split()[0], str(os.getpid()).encode())


@planting
def proc_file_of_dead_process() -> Planting:
    pid = child(lambda: None)
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    folder = os.open(f"/proc/{pid}", os.O_RDONLY)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    yield
    for one in (fd, folder):
        os.fstat(one)
    with contextlib.suppress(ProcessLookupError):
        os.read(fd, 99)


@planting
def proc_file_of_dead_thread() -> Planting:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, daemon=True)
    thread.start()
    tid = thread.native_id
    fd = os.open(f"/proc/self/task/{tid}/stat", os.O_RDONLY)
    gate.set()
    thread.join()
    while os.path.exists(f"/proc/self/task/{tid}"):
        time.sleep(0.01)
    yield
    os.fstat(fd)


@planting
def chrooted() -> Planting:
    os.makedirs("/root/jail/sub")

    def work() -> None:
        os.chroot("/root/jail")
        os.chdir("/sub")

    pid = child(work)
    yield
    same(os.readlink(f"/proc/{pid}/root"), "/root/jail")
    alive(pid)


@planting
def outside_of_its_root() -> Planting:
    os.makedirs("/root/jail")
    pid = child(lambda: os.chroot("/root/jail"))  # its working directory is not below it
    yield
    alive(pid)


@planting
def deleted_directory() -> Planting:
    os.makedirs("/root/gone/sub")
    os.chdir("/root/gone/sub")
    fd = os.open(".", os.O_RDONLY)
    os.rmdir("/root/gone/sub")
    os.rmdir("/root/gone")
    yield
    os.fstat(fd)


@planting
def lease_on_file() -> Planting:
    fd = os.open("/root/leased", os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(fd, 1024, fcntl.F_WRLCK)
    yield
    same(fcntl.fcntl(fd, 1025), fcntl.F_WRLCK)


@planting
def ofd_lock() -> Planting:
    fd = os.open("/root/locked", os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(fd, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 10, 0))
    yield
    other = os.open("/root/locked", os.O_RDWR)
    same(struct.unpack("hhqqi4x", fcntl.fcntl(other, 36, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 10, 0)))[0], 1)


@planting
def waiting_for_lock() -> Planting:
    fd = os.open("/root/locked", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)

    def wait() -> None:
        other = os.open("/root/locked", os.O_RDWR)
        fcntl.flock(other, fcntl.LOCK_EX)
        os._exit(5)

    pid = os.fork()
    if pid == 0:
        wait()
    while "flock" not in open(f"/proc/{pid}/wchan").read() and "lock" not in open(f"/proc/{pid}/wchan").read():
        time.sleep(0.02)
    yield
    fcntl.flock(fd, fcntl.LOCK_UN)
    same(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 5)


@planting
def overmounted_open_file() -> Planting:
    os.makedirs("/mnt/t")
    same(libc.mount(b"none", b"/mnt/t", b"tmpfs", 0, None), 0)
    file = open("/mnt/t/file", "w+")
    same(libc.mount(b"none", b"/mnt/t", b"tmpfs", 0, None), 0)
    yield
    file.write("x")


@planting
def detached_mount_open_file() -> Planting:
    os.makedirs("/mnt/t")
    same(libc.mount(b"none", b"/mnt/t", b"tmpfs", 0, None), 0)
    file = open("/mnt/t/file", "w+")
    same(libc.umount2(b"/mnt/t", 2), 0)
    yield
    file.write("x")


@planting
def open_sysfs_and_proc() -> Planting:
    files = [
        open(path)
        for path in ("/proc/meminfo", "/proc/sys/kernel/hostname", "/sys/kernel/mm/transparent_hugepage/enabled")
    ]
    yield
    for one in files:
        same(len(one.read()) > 0, True)


@planting
def lease_to_read() -> Planting:
    open("/root/leased", "w").close()
    fd = os.open("/root/leased", os.O_RDONLY)
    fcntl.fcntl(fd, 1024, fcntl.F_RDLCK)
    yield
    same(fcntl.fcntl(fd, 1025), fcntl.F_RDLCK)


@planting
def proc_task_file_of_dead_process() -> Planting:
    pid = child(lambda: None)
    fd = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    yield
    os.fstat(fd)


@planting
def proc_task_file_of_thread() -> Planting:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, daemon=True)
    thread.start()
    fd = os.open(f"/proc/self/task/{thread.native_id}/stat", os.O_RDONLY)
    yield
    same(int(os.read(fd, 99).split()[0]), thread.native_id)
    gate.set()


@planting
def file_hidden_by_mount() -> Planting:
    os.makedirs("/root/d")
    file = open("/root/d/file", "w+")
    same(libc.mount(b"none", b"/root/d", b"tmpfs", 0, None), 0)
    yield
    file.write("x")
    file.flush()


@planting
def directory_hidden_by_mount() -> Planting:
    """A shell whose working directory was mounted over."""
    os.makedirs("/root/d")
    os.chdir("/root/d")
    same(libc.mount(b"none", b"/root/d", b"tmpfs", 0, None), 0)
    yield
    os.listdir(".")
