"""Small programs that each hold one thing of which `plan` must know whether it can move.

    python plantings.py NAME

It plants the thing, prints `planted`, reads a line, looks whether it still has
the thing, and prints `ok`, or `bad:` and what is wrong. Each is a generator in
PLANTINGS that yields when the thing is planted; what comes after is the look.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from typing import Any

Planting = Generator[None, None, None]
PLANTINGS: dict[str, Callable[[], Planting]] = {}
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_kept: list[Any] = []


def planting(function: Callable[[], Planting]) -> Callable[[], Planting]:
    PLANTINGS[function.__name__] = function
    return function


def same(got: Any, wanted: Any) -> None:
    if got != wanted:
        raise AssertionError(f"{got!r:.200} instead of {wanted!r:.200}")


def call(number: int, *args: Any) -> int:
    """A system call by its number on x86-64; raises OSError."""
    done = libc.syscall(ctypes.c_long(number), *args)
    if done < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return int(done)


def child(work: Callable[[], None]) -> int:
    """A child that does `work`, says so, and waits; it ends with its parent. Returns its pid once it has done that."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        same(os.read(read, 9), b"done")
        os.close(read)
        return pid
    try:
        libc.prctl(1, signal.SIGKILL)
        work()
        os.write(write, b"done")
        os.close(write)
        os.close(read)
        while True:
            signal.pause()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def alive(pid: int) -> None:
    same(os.waitpid(pid, os.WNOHANG), (0, 0))


NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET, NEWTIME = 0x10000000, 0x20000000, 0x40000000, 0x80


def unshare(flags: int) -> None:
    call(272, flags)


def _namespace(flags: int, name: str) -> Planting:
    pid = child(lambda: unshare(flags))
    yield
    alive(pid)
    same(os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"), True)


@planting
def nothing() -> Planting:
    yield


@planting
def user_namespace() -> Planting:
    return _namespace(NEWUSER, "user")


@planting
def mount_namespace() -> Planting:
    return _namespace(NEWNS, "mnt")


@planting
def mount_namespace_with_tmpfs() -> Planting:
    def work() -> None:
        unshare(NEWNS)
        os.makedirs("/mnt/t")
        same(libc.mount(b"none", b"/mnt/t", b"tmpfs", 0, None), 0)
        open("/mnt/t/file", "w").write("inside")

    pid = child(work)
    yield
    same(open(f"/proc/{pid}/root/mnt/t/file").read(), "inside")
    same(os.listdir("/mnt/t"), [])


@planting
def uts_namespace() -> Planting:
    return _namespace(NEWUTS, "uts")


@planting
def ipc_namespace() -> Planting:
    return _namespace(NEWIPC, "ipc")


@planting
def net_namespace() -> Planting:
    return _namespace(NEWNET, "net")


@planting
def cgroup_namespace() -> Planting:
    return _namespace(NEWCGROUP, "cgroup")


@planting
def time_namespace() -> Planting:
    def work() -> None:
        unshare(NEWTIME)
        pid = child(lambda: None)
        _kept.append(pid)

    pid = child(work)
    yield
    alive(pid)


@planting
def time_namespace_for_children() -> Planting:
    pid = child(lambda: unshare(NEWTIME))
    yield
    alive(pid)


@planting
def pid_namespace() -> Planting:
    def work() -> None:
        unshare(NEWPID)
        _kept.append(child(lambda: None))

    pid = child(work)
    yield
    alive(pid)


@planting
def pid_namespace_for_children() -> Planting:
    pid = child(lambda: unshare(NEWPID))
    yield
    alive(pid)


@planting
def perf_event() -> Planting:
    attributes = struct.pack("IIQQQQQ", 1, 112, 1, 0, 0, 0, 0x20) + bytes(72)
    fd = call(298, attributes, 0, -1, -1, 0)
    yield
    os.fstat(fd)


def _bpf_map() -> int:
    return call(321, 0, struct.pack("IIIII", 2, 4, 8, 4, 0) + bytes(100), 120)  # BPF_MAP_CREATE, an array


@planting
def bpf_map() -> Planting:
    fd = _bpf_map()
    key, value = ctypes.create_string_buffer(struct.pack("I", 2)), ctypes.create_string_buffer(struct.pack("Q", 77))
    address = ctypes.addressof
    call(321, 2, struct.pack("IIQQQ", fd, 0, address(key), address(value), 0), 32)
    yield
    ctypes.memset(value, 0, 8)
    call(321, 1, struct.pack("IIQQQ", fd, 0, address(key), address(value), 0), 32)
    same(struct.unpack("Q", value.raw[:8])[0], 77)


@planting
def bpf_hash_map() -> Planting:
    fd = call(321, 0, struct.pack("IIIII", 1, 4, 8, 16, 0) + bytes(100), 120)
    key, value = ctypes.create_string_buffer(struct.pack("I", 2)), ctypes.create_string_buffer(struct.pack("Q", 77))
    address = ctypes.addressof
    call(321, 2, struct.pack("IIQQQ", fd, 0, address(key), address(value), 0), 32)
    yield
    ctypes.memset(value, 0, 8)
    call(321, 1, struct.pack("IIQQQ", fd, 0, address(key), address(value), 0), 32)
    same(struct.unpack("Q", value.raw[:8])[0], 77)


@planting
def bpf_ringbuf_map() -> Planting:
    fd = call(321, 0, struct.pack("IIIII", 27, 0, 0, 4096, 0) + bytes(100), 120)
    yield
    os.fstat(fd)


@planting
def bpf_program() -> Planting:
    code = ctypes.create_string_buffer(struct.pack("BBhi", 0xB7, 0, 0, 0) + struct.pack("BBhi", 0x95, 0, 0, 0))
    licence = ctypes.create_string_buffer(b"GPL")
    data = struct.pack("IIQQ", 1, 2, ctypes.addressof(code), ctypes.addressof(licence))  # a socket filter
    fd = call(321, 5, data + bytes(96), 120)
    yield
    os.fstat(fd)


@planting
def userfault() -> Planting:
    fd = call(323, os.O_CLOEXEC)
    yield
    os.fstat(fd)


@planting
def io_uring() -> Planting:
    fd = call(425, 8, ctypes.create_string_buffer(120))
    yield
    os.fstat(fd)


@planting
def fanotify_group() -> Planting:
    fd = call(300, 0, os.O_RDONLY)
    yield
    os.fstat(fd)


@planting
def landlock_ruleset() -> Planting:
    fd = call(444, struct.pack("Q", 0x4), 8, 0)
    yield
    os.fstat(fd)


@planting
def secret_memory() -> Planting:
    fd = call(447, 0)
    os.ftruncate(fd, 4096)
    view = mmap.mmap(fd, 4096)
    view[:6] = b"secret"
    yield
    same(view[:6], b"secret")


@planting
def pidfd_of_child() -> Planting:
    pid = child(lambda: None)
    fd = os.pidfd_open(pid)
    yield
    signal.pidfd_send_signal(fd, signal.SIGKILL)
    same(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), -9)


@planting
def pidfd_of_dead_process() -> Planting:
    pid = child(lambda: None)
    fd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    yield
    same(bool(select.select([fd], [], [], 5)[0]), True)


@planting
def pidfd_of_thread() -> Planting:
    gate = threading.Event()
    threading.Thread(target=gate.wait, daemon=True).start()
    tid = next(int(one) for one in os.listdir("/proc/self/task") if int(one) != os.getpid())
    fd = call(434, tid, 0x80)  # PIDFD_THREAD
    yield
    os.fstat(fd)


def _queue(messages: tuple[bytes, ...] = ()) -> int:
    fd = libc.mq_open(b"/queue", os.O_RDWR | os.O_CREAT, 0o600, None)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "mq_open")
    for one in messages:
        same(libc.mq_send(fd, one, len(one), 0), 0)
    return int(fd)


@planting
def message_queue() -> Planting:
    fd = _queue((b"first",))
    yield
    buffer = ctypes.create_string_buffer(8192)
    same(libc.mq_receive(fd, buffer, 8192, None), 5)


@planting
def message_queue_not_open() -> Planting:
    os.close(_queue((b"first",)))
    yield
    fd = libc.mq_open(b"/queue", os.O_RDWR)
    same(fd >= 0, True)
    buffer = ctypes.create_string_buffer(8192)
    same(libc.mq_receive(fd, buffer, 8192, None), 5)


@planting
def message_queue_mount() -> Planting:
    os.makedirs("/mnt/mq")
    same(libc.mount(b"none", b"/mnt/mq", b"mqueue", 0, None), 0)
    yield
    same(os.path.ismount("/mnt/mq"), True)


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


def until_executed(pid: int) -> None:
    own = os.readlink("/proc/self/exe")
    while os.readlink(f"/proc/{pid}/exe") == own:
        time.sleep(0.01)


@planting
def deleted_program() -> Planting:
    subprocess.run(["cp", "/bin/sleep", "/root/tool"], check=True)
    process = subprocess.Popen(["/root/tool", "1000"])
    until_executed(process.pid)
    os.unlink("/root/tool")
    yield
    same(process.poll(), None)


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
def ping_socket() -> Planting:
    with open("/proc/sys/net/ipv4/ping_group_range", "w") as file:  # of the session's own network
        file.write("0 10")
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
    yield
    sock.sendto(b"\x08\0\0\0\0\0\0\1hello", ("127.0.0.1", 0))
    sock.settimeout(5)
    same(sock.recv(99)[8:], b"hello")


@planting
def raw_socket() -> Planting:
    sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    yield
    sock.sendto(b"\x08\0\xf7\xff\0\0\0\0", ("127.0.0.1", 0))
    sock.settimeout(5)
    same(sock.recv(99)[20:21], b"\x08")


@planting
def packet_socket() -> Planting:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.bind(("lo", 0))
    yield
    sock.settimeout(5)
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))
    same(len(sock.recv(999)) > 0, True)


@planting
def packet_socket_ring() -> Planting:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.setsockopt(263, 5, struct.pack("IIII", 4096, 4, 2048, 8))  # PACKET_RX_RING
    view = mmap.mmap(sock.fileno(), 4 * 4096)
    yield
    same(len(view[:4]), 4)


@planting
def netlink_socket() -> Planting:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    sock.bind((0, 1))
    yield
    same(sock.getsockname()[1], 1)


@planting
def netlink_socket_with_news() -> Planting:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    sock.bind((0, 1))
    subprocess.run(["ip", "link", "set", "lo", "mtu", "60000"], check=True)
    yield
    same(len(sock.recv(9999, socket.MSG_DONTWAIT)) > 0, True)


@planting
def netlink_uevent_socket() -> Planting:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15)
    sock.bind((0, 1))
    yield
    same(sock.getsockname()[1], 1)


@planting
def netlink_netfilter_socket() -> Planting:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
    sock.bind((0, 0))
    yield
    same(sock.getsockname()[0] > 0, True)


@planting
def vsock_socket() -> Planting:
    sock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM, 0)
    yield
    sock.fileno()


@planting
def mptcp_socket() -> Planting:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
    yield
    sock.fileno()


@planting
def udplite_socket() -> Planting:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 136)
    sock.bind(("127.0.0.1", 7777))
    yield
    same(sock.getsockname()[1], 7777)


@planting
def corked_udp() -> Planting:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect(("127.0.0.1", 9))
    sock.setsockopt(socket.IPPROTO_UDP, 1, 1)
    sock.send(b"held back")
    yield
    sock.setsockopt(socket.IPPROTO_UDP, 1, 0)


@planting
def corked_udp_empty() -> Planting:
    sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_UDP, 1, 1)
    yield
    same(sock.getsockopt(socket.IPPROTO_UDP, 1), 1)


@planting
def udp_more() -> Planting:
    """MSG_MORE corks for one datagram, without the option."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect(("127.0.0.1", 9))
    sock.send(b"held back", socket.MSG_MORE)
    yield
    sock.send(b"more")


@planting
def tcp_corked() -> Planting:
    server = socket.create_server(("127.0.0.1", 7201))
    sock = socket.create_connection(("127.0.0.1", 7201))
    peer, _ = server.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
    sock.send(b"held")
    yield
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
    peer.settimeout(5)
    same(peer.recv(9), b"held")


@planting
def unix_unaccepted() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/root/sock")
    listener.listen()
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("/root/sock")
    yield
    peer, _ = listener.accept()
    sock.send(b"hello")
    same(peer.recv(9), b"hello")


@planting
def unix_unaccepted_with_data() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/root/sock")
    listener.listen()
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("/root/sock")
    sock.send(b"hello")
    yield
    peer, _ = listener.accept()
    same(peer.recv(9), b"hello")


@planting
def unix_unaccepted_closed() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/root/sock")
    listener.listen()
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("/root/sock")
    sock.close()
    yield
    peer, _ = listener.accept()
    same(peer.recv(9), b"")


@planting
def unix_unaccepted_seqpacket() -> Planting:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0seq")
    listener.listen()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect("\0seq")
    yield
    peer, _ = listener.accept()
    sock.send(b"hello")
    same(peer.recv(9), b"hello")


@planting
def unix_descriptor_in_flight() -> Planting:
    one, two = socket.socketpair()
    with open("/root/sent", "w+") as file:
        file.write("sent")
        file.flush()
        socket.send_fds(one, [b"x"], [file.fileno()])
    yield
    _, fds, _, _ = socket.recv_fds(two, 9, 9)
    same(os.pread(fds[0], 9, 0), b"sent")


@planting
def unix_peer_gone() -> Planting:
    one, two = socket.socketpair()
    two.send(b"last")
    two.close()
    yield
    same((one.recv(9), one.recv(9)), (b"last", b""))


@planting
def unix_datagram_peer_gone() -> Planting:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    two.close()
    yield
    try:
        one.send(b"x")
    except OSError:
        return
    raise AssertionError("sent")


@planting
def unix_deleted_name() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/root/gone")
    listener.listen()
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("/root/gone")
    peer, _ = listener.accept()
    os.unlink("/root/gone")
    yield
    sock.send(b"hello")
    same(peer.recv(9), b"hello")


@planting
def tcp_unaccepted() -> Planting:
    server = socket.create_server(("127.0.0.1", 7200))
    sock = socket.create_connection(("127.0.0.1", 7200))
    yield
    fresh = socket.create_connection(("127.0.0.1", 7200))
    server.settimeout(5)
    peer, _ = server.accept()
    fresh.send(b"hello")
    same(peer.recv(9), b"hello")
    sock.close()


@planting
def tcp_connecting() -> Planting:
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(("100.127.255.254", 9))
    yield
    sock.fileno()


@planting
def epoll_of_closed() -> Planting:
    """The number is closed, the pipe behind it lives in a child: still watched."""
    read, write = os.pipe()
    pid = child(lambda: None)
    poll = select.epoll()
    poll.register(read, select.EPOLLIN)
    os.close(read)
    yield
    os.write(write, b"x")
    same(len(poll.poll(5)), 1)
    alive(pid)


@planting
def epoll_of_reused() -> Planting:
    """The number was closed and given to another file, the pipe behind it lives under another number."""
    read, write = os.pipe()
    other = os.dup(read)
    poll = select.epoll()
    poll.register(read, select.EPOLLIN)
    os.dup2(os.open("/dev/null", os.O_RDONLY), read)
    yield
    os.write(write, b"x")
    same(len(poll.poll(5)), 1)
    os.close(other)


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
def path_descriptor_of_socket() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/root/psock")
    fd = os.open("/root/psock", os.O_PATH)
    yield
    os.fstat(fd)


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
def proc_namespace_file() -> Planting:
    fds = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ("net", "mnt", "pid", "uts", "ipc", "user")]
    yield
    for fd in fds:
        call(308, fd, 0) if fd != fds[5] else None


@planting
def namespace_without_process() -> Planting:
    """As `ip netns` keeps one: by a descriptor alone."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        unshare(NEWNET)
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    yield
    same(call(308, fd, NEWNET), 0)


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
def aio_context() -> Planting:
    context = ctypes.c_ulong(0)
    call(206, 16, ctypes.byref(context))
    yield
    call(207, context)


@planting
def aio_context_pending() -> Planting:
    context = ctypes.c_ulong(0)
    call(206, 16, ctypes.byref(context))
    read, _write = os.pipe()
    block = ctypes.create_string_buffer(64)
    struct.pack_into("QIIHhIQQqQII", block, 0, 7, 0, 0, 5, 0, read, 1, 0, 0, 0, 0, 0)  # IOCB_CMD_POLL
    pointer = ctypes.pointer(block)
    call(209, context, 1, ctypes.byref(pointer))
    _kept.append((block, pointer, _write))
    yield
    os.write(_write, b"x")
    event = ctypes.create_string_buffer(32)
    same(call(208, context, 1, 1, event, struct.pack("qq", 3, 0)), 1)


@planting
def huge_pages() -> Planting:
    address = libc.mmap(None, 2 << 20, 3, 0x40022, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    yield
    ctypes.memset(address, 1, 4096)


@planting
def huge_pages_reserved_not() -> Planting:
    """MAP_NORESERVE works where the machine has no huge page at all."""
    address = libc.mmap(None, 2 << 20, 0, 0x44022, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    yield


@planting
def huge_memfd() -> Planting:
    fd = os.memfd_create("huge", os.MFD_HUGETLB)
    yield
    os.fstat(fd)


@planting
def reservation() -> Planting:
    address = libc.mmap(None, 40 << 30, 0, 0x4022, -1, 0)
    same(address != ctypes.c_void_p(-1).value, True)
    yield


@planting
def tmpfs_mount() -> Planting:
    os.makedirs("/mnt/t")
    same(libc.mount(b"none", b"/mnt/t", b"tmpfs", 0, None), 0)
    open("/mnt/t/file", "w").write("inside")
    yield
    same(open("/mnt/t/file").read(), "inside")


@planting
def bind_mount() -> Planting:
    os.makedirs("/mnt/b")
    os.makedirs("/root/bound")
    open("/root/bound/file", "w").write("bound")
    same(libc.mount(b"/root/bound", b"/mnt/b", None, 4096, None), 0)
    yield
    same(open("/mnt/b/file").read(), "bound")


@planting
def bind_mount_of_file() -> Planting:
    open("/root/one", "w").write("one")
    open("/root/two", "w").write("two")
    same(libc.mount(b"/root/one", b"/root/two", None, 4096, None), 0)
    yield
    same(open("/root/two").read(), "one")


@planting
def overlay_mount() -> Planting:
    same(libc.mount(b"none", b"/mnt", b"tmpfs", 0, None), 0)
    for name in "lumo":
        os.makedirs(f"/mnt/{name}")
    options = b"lowerdir=/mnt/l,upperdir=/mnt/u,workdir=/mnt/m"
    if libc.mount(b"overlay", b"/mnt/o", b"overlay", 0, options):
        raise OSError(ctypes.get_errno(), "overlay")
    open("/mnt/o/file", "w").write("over")
    yield
    same(open("/mnt/o/file").read(), "over")
    same(open("/mnt/u/file").read(), "over")


@planting
def overlay_mount_over_root() -> Planting:
    for name in "lumo":
        os.makedirs(f"/root/{name}")
    same(libc.mount(b"none", b"/root/u", b"tmpfs", 0, None), 0)
    os.makedirs("/root/u/u")
    os.makedirs("/root/u/w")
    options = b"lowerdir=/root/l,upperdir=/root/u/u,workdir=/root/u/w"
    if libc.mount(b"overlay", b"/root/o", b"overlay", 0, options):
        raise OSError(ctypes.get_errno(), "overlay")
    yield
    open("/root/o/file", "w").write("over")


@planting
def ramfs_mount() -> Planting:
    os.makedirs("/mnt/r")
    same(libc.mount(b"none", b"/mnt/r", b"ramfs", 0, None), 0)
    yield
    same(os.path.ismount("/mnt/r"), True)


def _simple_mount(kind: bytes) -> Planting:
    os.makedirs("/mnt/x")
    if libc.mount(b"none", b"/mnt/x", kind, 0, None):
        raise OSError(ctypes.get_errno(), f"mount {kind!r}")
    yield
    same(os.path.ismount("/mnt/x"), True)


@planting
def proc_mount() -> Planting:
    return _simple_mount(b"proc")


@planting
def sysfs_mount() -> Planting:
    return _simple_mount(b"sysfs")


@planting
def devpts_mount() -> Planting:
    return _simple_mount(b"devpts")


@planting
def debugfs_mount() -> Planting:
    return _simple_mount(b"debugfs")


@planting
def tracefs_mount() -> Planting:
    return _simple_mount(b"tracefs")


@planting
def securityfs_mount() -> Planting:
    return _simple_mount(b"securityfs")


@planting
def fusectl_mount() -> Planting:
    return _simple_mount(b"fusectl")


@planting
def bpf_mount() -> Planting:
    return _simple_mount(b"bpf")


@planting
def hugetlbfs_mount() -> Planting:
    return _simple_mount(b"hugetlbfs")


@planting
def cgroup2_mount() -> Planting:
    return _simple_mount(b"cgroup2")


@planting
def binfmt_mount() -> Planting:
    return _simple_mount(b"binfmt_misc")


@planting
def configfs_mount() -> Planting:
    return _simple_mount(b"configfs")


@planting
def pstore_mount() -> Planting:
    return _simple_mount(b"pstore")


@planting
def devtmpfs_mount() -> Planting:
    return _simple_mount(b"devtmpfs")


@planting
def fuse_mount() -> Planting:
    os.makedirs("/mnt/f")
    subprocess.run(["mknod", "/root/fuse", "c", "10", "229"], check=True)
    fd = os.open("/root/fuse", os.O_RDWR)
    os.unlink("/root/fuse")
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"x", b"/mnt/f", b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "fuse")
    yield
    os.fstat(fd)


@planting
def fuse_mount_of_dead_server() -> Planting:
    os.makedirs("/mnt/f")
    subprocess.run(["mknod", "/root/fuse", "c", "10", "229"], check=True)
    fd = os.open("/root/fuse", os.O_RDWR)
    os.unlink("/root/fuse")
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"x", b"/mnt/f", b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "fuse")
    os.close(fd)
    yield


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
def mount_descriptor() -> Planting:
    fd = call(428, -100, b"/etc", 1)  # open_tree, OPEN_TREE_CLONE
    yield
    os.fstat(fd)


@planting
def fs_context() -> Planting:
    fd = call(430, b"tmpfs", 0)
    yield
    os.fstat(fd)


@planting
def open_device() -> Planting:
    subprocess.run(["mknod", "/root/device", "c", "10", "229"], check=True)
    fd = os.open("/root/device", os.O_RDWR)
    os.unlink("/root/device")
    yield
    os.fstat(fd)


@planting
def device_node() -> Planting:
    subprocess.run(["mknod", "/root/device", "c", "1", "3"], check=True)
    yield
    same(os.stat("/root/device").st_rdev, os.makedev(1, 3))


@planting
def open_own_null_device() -> Planting:
    subprocess.run(["mknod", "/root/device", "c", "1", "3"], check=True)
    fd = os.open("/root/device", os.O_RDWR)
    os.unlink("/root/device")
    yield
    os.write(fd, b"x")


@planting
def tun_device() -> Planting:
    subprocess.run(["mknod", "/root/tun", "c", "10", "200"], check=True)
    fd = os.open("/root/tun", os.O_RDWR)
    os.unlink("/root/tun")
    fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", b"tun7", 0x1001))
    yield
    same(os.path.exists("/sys/class/net/tun7") or "tun7" in open("/proc/net/dev").read(), True)


@planting
def inotify_on_deleted() -> Planting:
    open("/root/watched", "w").close()
    file = open("/root/watched")
    fd = libc.inotify_init1(os.O_NONBLOCK)
    same(libc.inotify_add_watch(fd, b"/root/watched", 0xFFF) > 0, True)
    os.unlink("/root/watched")  # open: the watch stays
    yield
    file.close()


@planting
def inotify_on_deleted_directory() -> Planting:
    os.makedirs("/root/watched")
    os.chdir("/root/watched")
    fd = libc.inotify_init1(os.O_NONBLOCK)
    same(libc.inotify_add_watch(fd, b"/root/watched", 0xFFF) > 0, True)
    os.rmdir("/root/watched")
    yield
    os.fstat(fd)


@planting
def inotify_on_proc() -> Planting:
    fd = libc.inotify_init1(os.O_NONBLOCK)
    same(libc.inotify_add_watch(fd, b"/proc/self", 0xFFF) > 0, True)
    yield
    os.fstat(fd)


@planting
def inotify_on_tmpfs() -> Planting:
    fd = libc.inotify_init1(os.O_NONBLOCK)
    same(libc.inotify_add_watch(fd, b"/run", 0x100) > 0, True)
    yield
    open("/run/new", "w").close()
    same(len(os.read(fd, 999)) > 0, True)


@planting
def system_v_segment_removed() -> Planting:
    libc.shmat.restype = ctypes.c_void_p
    memory = libc.shmget(0, 1 << 16, 0o1600)
    address = libc.shmat(memory, None, 0)
    ctypes.memset(address, 7, 100)
    same(libc.shmctl(memory, 0, None), 0)
    yield
    same(ctypes.string_at(address, 3), b"\7\7\7")


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
    while len(_children(process.pid)) == 0:
        time.sleep(0.02)
    yield
    same(process.poll(), None)


def _children(pid: int) -> list[int]:
    return [int(one) for one in open(f"/proc/{pid}/task/{pid}/children").read().split()]


@planting
def shared_memory_processes() -> Planting:
    """CLONE_VM without CLONE_THREAD: two processes, one memory."""
    stack = mmap.mmap(-1, 1 << 20)
    top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 20) - 64
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)
    pause = ctypes.cast(libc.pause, ctypes.c_void_p)
    pid = libc.clone(pause, ctypes.c_void_p(top), 0x100 | signal.SIGCHLD, None)
    same(pid > 0, True)
    _kept.extend((stack, function))
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


# A program for the i386 system calls: pause(), for ever.
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


def _filter() -> Any:
    code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))  # allow
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(code)))
    _kept.extend((code, program))
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
def pending_trap_of_thread() -> Planting:
    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTRAP})
        signal.pthread_kill(threading.get_ident(), signal.SIGTRAP)

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
def locked_memory() -> Planting:
    view = mmap.mmap(-1, 1 << 20)
    libc.mlockall(1)
    yield
    view[0] = 1
    same("VmLck:\t       0 kB" in open("/proc/self/status").read(), False)


@planting
def guarded_memory() -> Planting:
    view = libc.mmap(None, 1 << 20, 3, 0x22, -1, 0)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    same(libc.madvise(view, 4096, 102), 0)  # MADV_GUARD_INSTALL
    yield
    ctypes.memset(view + 4096, 1, 9)


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
def dnotify() -> Planting:
    os.makedirs("/root/d")
    fd = os.open("/root/d", os.O_RDONLY)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(fd, 1026, 0x80000004)
    yield
    os.fstat(fd)


@planting
def sealed_memfd() -> Planting:
    fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.write(fd, b"x")
    fcntl.fcntl(fd, 1033, 15)
    yield
    same(fcntl.fcntl(fd, 1034), 15)


@planting
def limits() -> Planting:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    yield
    same(resource.getrlimit(resource.RLIMIT_AS), (8 << 30, 8 << 30))


@planting
def sub_cgroup() -> Planting:
    found = [one.split() for one in open("/proc/self/mountinfo") if " - cgroup2 " in one]
    if not found:
        raise OSError("no cgroup2 in the session")
    place = f"{found[0][4]}/inner"
    os.mkdir(place)
    pid = child(lambda: open(f"{place}/cgroup.procs", "w").write("0"))  # type: ignore[arg-type,return-value]
    yield
    alive(pid)


@planting
def unnamed_mapping_of_zero() -> Planting:
    fd = os.open("/dev/zero", os.O_RDWR)
    view = mmap.mmap(fd, 4096)
    view[0] = 5
    yield
    same(view[0], 5)


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
def open_sysfs_and_proc() -> Planting:
    files = [
        open(path)
        for path in ("/proc/meminfo", "/proc/sys/kernel/hostname", "/sys/kernel/mm/transparent_hugepage/enabled")
    ]
    yield
    for one in files:
        same(len(one.read()) > 0, True)


@planting
def pressure_trigger() -> Planting:
    fd = os.open("/proc/pressure/cpu", os.O_RDWR)
    os.write(fd, b"some 500000 2000000\0")
    yield
    os.fstat(fd)


@planting
def kernel_log() -> Planting:
    fd = os.open("/proc/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    yield
    os.fstat(fd)


@planting
def dev_kmsg() -> Planting:
    subprocess.run(["mknod", "/root/kmsg", "c", "1", "11"], check=True)
    fd = os.open("/root/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    os.unlink("/root/kmsg")
    yield
    os.fstat(fd)


@planting
def timerfd_alarm() -> Planting:
    fd = libc.timerfd_create(8, 0)  # CLOCK_REALTIME_ALARM
    if fd < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    yield
    os.fstat(fd)


@planting
def cpu_timer() -> Planting:
    timer = ctypes.c_int()
    same(libc.timer_create(2, None, ctypes.byref(timer)), 0)  # CLOCK_PROCESS_CPUTIME_ID
    yield


@planting
def packet_pipe() -> Planting:
    read, write = os.pipe2(os.O_DIRECT)
    os.write(write, b"one")
    os.write(write, b"two")
    yield
    same((os.read(read, 9), os.read(read, 9)), (b"one", b"two"))


@planting
def pipe_read_and_write() -> Planting:
    read, write = os.pipe()
    both = os.open(f"/proc/self/fd/{read}", os.O_RDWR)
    os.close(read)
    os.close(write)
    os.write(both, b"one")
    yield
    same(os.read(both, 9), b"one")


@planting
def sockets_with_options() -> Planting:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, 26, _socket_filter())  # SO_ATTACH_FILTER
    yield
    sock.fileno()


def _socket_filter() -> bytes:
    code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0xFFFF))
    _kept.append(code)
    return struct.pack("HxxxxxxQ", 1, ctypes.addressof(code))


@planting
def socket_with_bpf() -> Planting:
    code = ctypes.create_string_buffer(struct.pack("BBhi", 0xB7, 0, 0, 9) + struct.pack("BBhi", 0x95, 0, 0, 0))
    licence = ctypes.create_string_buffer(b"GPL")
    data = struct.pack("IIQQ", 1, 2, ctypes.addressof(code), ctypes.addressof(licence))
    fd = call(321, 5, data + bytes(96), 120)
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, 50, fd)
    os.close(fd)
    yield
    sock.fileno()


@planting
def lease_to_read() -> Planting:
    open("/root/leased", "w").close()
    fd = os.open("/root/leased", os.O_RDONLY)
    fcntl.fcntl(fd, 1024, fcntl.F_RDLCK)
    yield
    same(fcntl.fcntl(fd, 1025), fcntl.F_RDLCK)


@planting
def packet_pipe_empty() -> Planting:
    read, write = os.pipe2(os.O_DIRECT)
    yield
    os.write(write, b"one")
    same(os.read(read, 9), b"one")


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


@planting
def named_network() -> Planting:
    subprocess.run(["ip", "netns", "add", "inner"], check=True)
    yield
    same("inner" in os.listdir("/run/netns"), True)


@planting
def unix_three_unaccepted() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/root/sock")
    listener.listen()
    clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for one in clients:
        one.connect("/root/sock")
    yield
    for one in clients:
        one.send(b"hello")
    for _ in clients:
        same(listener.accept()[0].recv(9), b"hello")


@planting
def inotify_on_sysfs() -> Planting:
    fd = libc.inotify_init1(os.O_NONBLOCK)
    same(libc.inotify_add_watch(fd, b"/sys/kernel", 0xFFF) > 0, True)
    yield
    os.fstat(fd)


@planting
def inotify_on_devpts() -> Planting:
    fd = libc.inotify_init1(os.O_NONBLOCK)
    same(libc.inotify_add_watch(fd, b"/dev/pts", 0xFFF) > 0, True)
    yield
    os.fstat(fd)


@planting
def fifo_policy() -> Planting:
    pid = child(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(3)))
    yield
    same(os.sched_getscheduler(pid), os.SCHED_FIFO)


@planting
def left_its_cgroup() -> Planting:
    os.makedirs("/mnt/c")
    same(libc.mount(b"none", b"/mnt/c", b"cgroup2", 0, None), 0)

    def work() -> None:
        with open("/mnt/c/cgroup.procs", "w") as file:
            file.write("0")

    pid = child(work)
    yield
    alive(pid)


@planting
def own_sub_cgroup() -> Planting:
    os.makedirs("/mnt/c")
    same(libc.mount(b"none", b"/mnt/c", b"cgroup2", 0, None), 0)
    place = "/mnt/c" + open("/proc/self/cgroup").read().split("::")[1].strip() + "/inner"
    os.mkdir(place)

    def work() -> None:
        with open(f"{place}/cgroup.procs", "w") as file:
            file.write("0")

    pid = child(work)
    yield
    alive(pid)


@planting
def mapped_pipe_like_anon() -> Planting:
    """Shared anonymous memory that was inherited, then its maker has ended."""
    view = mmap.mmap(-1, 1 << 16)
    view[:5] = b"hello"
    pid = child(lambda: None)
    yield
    same(view[:5], b"hello")
    alive(pid)


@planting
def open_whiteout_like_device() -> Planting:
    os.unlink("/etc/motd") if os.path.exists("/etc/motd") else None
    yield


@planting
def ping_socket_v6() -> Planting:
    with open("/proc/sys/net/ipv4/ping_group_range", "w") as file:
        file.write("0 10")
    sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM, socket.IPPROTO_ICMPV6)
    yield
    sock.sendto(b"\x80\0\0\0\0\0\0\1hello", ("::1", 0))
    sock.settimeout(5)
    same(sock.recv(99)[8:], b"hello")


@planting
def epoll_shared_with_child() -> Planting:
    """The child has the epoll descriptor and has closed what it watches."""
    read, write = os.pipe()
    poll = select.epoll()
    poll.register(read, select.EPOLLIN)
    pid = child(lambda: os.close(read))
    yield
    os.write(write, b"x")
    same(len(poll.poll(5)), 1)
    alive(pid)


@planting
def epoll_closed_in_parent() -> Planting:
    """The parent has closed what the epoll descriptor it shares with its child watches."""
    read, write = os.pipe()
    poll = select.epoll()
    poll.register(read, select.EPOLLIN)
    pid = child(lambda: None)
    os.close(read)
    yield
    os.write(write, b"x")
    same(len(poll.poll(5)), 1)
    alive(pid)


@planting
def memfd_mapped_program() -> Planting:
    """A program that has replaced its own executable by prctl is not one from a memfd."""
    yield


@planting
def tracefs_in_debugfs() -> Planting:
    os.makedirs("/mnt/x")
    same(libc.mount(b"none", b"/mnt/x", b"debugfs", 0, None), 0)
    os.listdir("/mnt/x/tracing")
    yield


@planting
def pidfd_of_parent() -> Planting:
    fd = os.pidfd_open(1)
    yield
    signal.pidfd_send_signal(fd, 0)


def main() -> None:
    name = sys.argv[1]
    os.chdir("/root")
    try:
        planted = PLANTINGS[name]()
        next(planted)
    except BaseException as error:
        print(f"cannot plant: {error!r}", flush=True)
        traceback.print_exc()
        time.sleep(1000)
        return
    print("planted", flush=True)
    while True:
        sys.stdin.readline()
        try:
            next(planted, None)
            print("ok", flush=True)
        except BaseException as error:
            traceback.print_exc()
            print(f"bad: {error!r}", flush=True)


if __name__ == "__main__":
    main()
