"""Descriptors that are neither files of a file system nor sockets."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import threading

from tests.plantings.base import Planting, alive, call, child, kept, libc, planting, same


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
    kept.append((block, pointer, _write))
    yield
    os.write(_write, b"x")
    event = ctypes.create_string_buffer(32)
    same(call(208, context, 1, 1, event, struct.pack("qq", 3, 0)), 1)


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
def device_node_of_host() -> Planting:
    subprocess.run(["mknod", "/root/device", "c", "10", "229"], check=True)
    yield
    same(os.stat("/root/device").st_rdev, os.makedev(10, 229))


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
def dnotify() -> Planting:
    os.makedirs("/root/d")
    fd = os.open("/root/d", os.O_RDONLY)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(fd, 1026, 0x80000004)
    yield
    os.fstat(fd)


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
def packet_pipe_empty() -> Planting:
    read, write = os.pipe2(os.O_DIRECT)
    yield
    os.write(write, b"one")
    same(os.read(read, 9), b"one")


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
def pidfd_of_parent() -> Planting:
    fd = os.pidfd_open(1)
    yield
    signal.pidfd_send_signal(fd, 0)
