"""Read the open descriptors of a process, to find those that CRIU cannot dump. No process is stopped for it, and
nothing is opened except files in /proc and, briefly, a duplicate of an inet socket, whose options no file shows."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import socket
import stat
import struct
from dataclasses import dataclass, field

from cmdop_migrate.preflight.facts.mount_table import MountTable
from cmdop_migrate.util import proc

# Kinds of sockets that CRIU dumps, as the kernel names their protocols.
_SOCKETS = "TCP TCPv6 UDP UDPv6 UDP-Lite UDPLITE UDPLITEv6 RAW RAWv6 PING PINGv6 UNIX UNIX-STREAM NETLINK PACKET"
SOCKETS = frozenset(_SOCKETS.split())
_INET = SOCKETS - {"PING", "PINGv6", "UNIX", "UNIX-STREAM", "NETLINK"}
# Anonymous inodes that CRIU dumps. It can be built to dump bpf maps as well; Debian's build cannot.
_ANONYMOUS = frozenset(("[eventfd]", "[eventpoll]", "inotify", "[fanotify]", "[signalfd]", "[timerfd]", "[pidfd]"))
_MEMORY, _MISC, _TUN = 1, 10, 200
_TERMINALS = frozenset((5, 188, 204, *range(128, 144)))
_TTY, _CONSOLES = 4, 64  # tty1 … tty63; above them are serial lines
_DELETED = " (deleted)"
_NAMELESS = ("/memfd:", "/SYSV", "/[aio]", "/anon_hugepage", "/secretmem", "/dev/zero")
_NAMESPACE = re.compile(r"(mnt|net|ipc|uts|pid|user|cgroup|time):\[\d+\]$")
_TASK = re.compile(r"/proc/(\d+)/task/(\d+)(/|$)")
_ALARMS = {"8": "CLOCK_REALTIME_ALARM", "9": "CLOCK_BOOTTIME_ALARM"}
_PIDFD_THREAD, _O_DIRECT = 0o200, os.O_DIRECT
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
_KCMP_VM, _KCMP_FS, _KCMP_EPOLL = 1, 3, 7
_UDP_CORK, _SO_GET_FILTER = 1, 26
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class DescriptorFacts:
    """Hold the facts of the descriptors of one process. `obstacles`: (kind, what), of preflight/rules/obstacles.py.
    `deleted`: files without a name, with the bytes they take. `polls`: for each epoll descriptor, the descriptors
    it watches and one of them that is not open."""

    obstacles: set[tuple[str, str]] = field(default_factory=set)
    io_uring: bool = False
    semaphore: bool = False
    devices: set[str] = field(default_factory=set)
    sockets: set[str] = field(default_factory=set)
    deleted: set[tuple[str, int]] = field(default_factory=set)
    namespaces: set[str] = field(default_factory=set)
    polls: list[tuple[str, str]] = field(default_factory=list)
    unix: set[int] = field(default_factory=set)
    netlink: set[int] = field(default_factory=set)


def read(pid: int, table: MountTable, known: set[int], pids: set[int]) -> DescriptorFacts:
    """Read every descriptor of `pid`. `table`: the mounts it sees; `known`: the ids of all mounts of the session;
    `pids`: the session's processes."""
    return _Reader(pid, table, known, pids).run()


class _Reader:
    def __init__(self, pid: int, table: MountTable, known: set[int], pids: set[int]) -> None:
        self.pid, self.table, self.known, self.pids = pid, table, known, pids
        self.held = DescriptorFacts()
        self.inodes: dict[str, int] = {}
        self.epolls: list[str] = []
        self.pidfd: int | None = None

    def run(self) -> DescriptorFacts:
        """Read all descriptors."""
        try:
            for fd in _fds(self.pid):
                try:
                    self._read(fd)
                except OSError:
                    continue  # closed meanwhile
            for fd in self.epolls:
                self._epoll(fd)
        finally:
            if self.pidfd is not None:
                os.close(self.pidfd)
        return self.held

    def _read(self, fd: str) -> None:
        path = f"/proc/{self.pid}/fd/{fd}"
        link, info = os.readlink(path), os.stat(path)
        self.inodes[fd] = info.st_ino
        mode = info.st_mode
        if link.startswith("anon_inode:"):
            self._anonymous(fd, link.removeprefix("anon_inode:"))
        elif stat.S_ISSOCK(mode):
            self._socket(fd, path, link)
        elif stat.S_ISFIFO(mode):
            if link.startswith("pipe:[") and self._flags(fd) & _O_DIRECT:
                self._add("packet_pipe")
        elif is_odd_device(mode, info.st_rdev):
            self.held.devices.add(link)
        elif _NAMESPACE.match(link):
            self.held.namespaces.add(link)
        elif stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
            self._file(fd, link, info)

    def _add(self, kind: str, what: str = "") -> None:
        self.held.obstacles.add((kind, what))

    def _info(self, fd: str) -> str:
        with open(f"/proc/{self.pid}/fdinfo/{fd}", encoding="ascii", errors="replace") as file:
            return file.read()

    def _flags(self, fd: str) -> int:
        return int(_field(self._info(fd), "flags:") or "0", 8)

    def _anonymous(self, fd: str, name: str) -> None:
        if name == "[io_uring]":
            self.held.io_uring = True
        elif name not in _ANONYMOUS:
            self._add("descriptor", name.strip("[]"))
        elif name == "[eventfd]":
            self.held.semaphore = self.held.semaphore or "eventfd-semaphore: 1" in self._info(fd)
        elif name == "[timerfd]":
            clock = _field(self._info(fd), "clockid:")
            if clock in _ALARMS:
                self._add("alarm_timer", _ALARMS[clock])
        elif name == "[pidfd]":
            self._pidfd(fd)
        elif name == "[eventpoll]":
            self.epolls.append(fd)

    def _pidfd(self, fd: str) -> None:
        text = self._info(fd)
        other = int(_field(text, "Pid:") or "-1")
        if int(_field(text, "flags:") or "0", 8) & _PIDFD_THREAD:
            self._add("descriptor", "a pidfd of a thread")
        elif other not in self.pids and other > 0:
            self._add("descriptor", f"a pidfd of pid {other}, which is not in the session")

    def _epoll(self, fd: str) -> None:
        """Check an epoll set: CRIU searches its files among the descriptors of the process that has the set."""
        try:
            text = self._info(fd)
        except OSError:
            return
        watched = [line for line in text.splitlines() if line.startswith("tfd:")]
        missing = ""
        for line in watched:
            words = line.replace(":", " ").split()
            number, inode = words[1], int(words[words.index("ino") + 1], 16)
            if self.inodes.get(number) != inode and not self._is_open(fd, number, inode):
                missing = missing or number
        self.held.polls.append(("\n".join(watched), missing))

    def _is_open(self, epoll: str, number: str, inode: int) -> bool:
        """Tell whether the file of a closed descriptor is open under another number."""
        slot = struct.pack("=III", int(epoll), int(number), 0)
        same = (other for other, number_of in self.inodes.items() if number_of == inode)
        return any(_compare(self.pid, self.pid, _KCMP_EPOLL, int(other), slot) for other in same)

    def _socket(self, fd: str, path: str, link: str) -> None:
        if not link.startswith("socket:["):
            self._add("path_socket", link)
            return
        name = _protocol(path)
        if name and name not in SOCKETS:
            self.held.sockets.add(name)
        number = int(link[8:-1])
        if name.startswith("UNIX"):
            self.held.unix.add(number)
        elif name == "NETLINK":
            self.held.netlink.add(number)
        elif name in _INET:
            self._inet(int(fd), name)

    def _inet(self, fd: int, name: str) -> None:
        """Check what only the socket itself tells: an option, and whether its filter is a BPF program."""
        if self.pidfd is None:
            self.pidfd = os.pidfd_open(self.pid)
        try:
            copy = proc.copy_from_pidfd(self.pidfd, fd)
        except OSError:
            return  # closed meanwhile
        with socket.socket(fileno=copy) as sock:
            if name.startswith("UDP") and sock.getsockopt(socket.IPPROTO_UDP, _UDP_CORK):
                self._add("corked")
            try:
                sock.getsockopt(socket.SOL_SOCKET, _SO_GET_FILTER, 1)
            except PermissionError:
                self._add("bpf_filter")
            except OSError:
                pass  # a classic filter, which CRIU reads

    def _file(self, fd: str, link: str, info: os.stat_result) -> None:
        if link.startswith("/secretmem"):
            self._add("secret_memory")
            return
        if not link.startswith("/"):
            return
        if link.startswith(_NAMELESS):
            if link.startswith("/memfd:") and info.st_blksize >= 2 << 20:  # of hugetlbfs
                self._add("huge_pages")
            return
        text = self._info(fd)
        mount = self.table.mounts.get(mount_id := int(_field(text, "mnt_id:") or "0"))
        if mount_id not in self.known:
            of_queues = {other.device for other in self.table.mounts.values() if other.kind == "mqueue"}
            self._add("message_queue" if _device(info.st_dev) in of_queues else "detached_file", link)
        elif (task := _TASK.match(link)) and task[1] != task[2]:
            self._add("thread_file", link.removesuffix(_DELETED))
        elif is_deleted_file(link):
            if info.st_nlink == 0 and stat.S_ISREG(info.st_mode):
                self.held.deleted.add((link.removesuffix(_DELETED), info.st_blocks * 512))
        elif mount is not None and self.table.at(link) is not mount and self._is_hidden(link, info):
            self._add("hidden_file", link)

    def _is_hidden(self, link: str, info: os.stat_result) -> bool:
        try:
            there = os.stat(f"/proc/{self.pid}/root{link}", follow_symlinks=False)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (info.st_dev, info.st_ino)


def shares_memory(pid: int, parent: int) -> bool:
    """Tell whether two processes share their memory: during a vfork, or since a clone with CLONE_VM."""
    return _compare(pid, parent, _KCMP_VM, 0, None)


def shares_place(pid: int, parent: int) -> bool:
    """Tell whether two processes share working directory, root and umask: since a clone with CLONE_FS."""
    return _compare(pid, parent, _KCMP_FS, 0, None)


def _compare(pid: int, other: int, kind: int, first: int, second: bytes | None) -> bool:
    """Tell whether two processes share a resource, by kcmp(2)."""
    return _KCMP is not None and _libc.syscall(_KCMP, pid, other, kind, ctypes.c_ulong(first), second) == 0


def _field(text: str, name: str) -> str:
    for line in text.splitlines():
        if line.startswith(name):
            return line[len(name) :].strip()
    return ""


def _device(number: int) -> int:
    return os.major(number) << 20 | os.minor(number)


def is_odd_device(mode: int, number: int) -> bool:
    """Tell whether CRIU cannot open this device again: it supports memory devices, terminals and tun."""
    if not stat.S_ISCHR(mode):
        return stat.S_ISBLK(mode)
    major, minor = os.major(number), os.minor(number)
    if major == _TTY:
        return minor >= _CONSOLES
    return major != _MEMORY and major not in _TERMINALS and (major, minor) != (_MISC, _TUN)


def is_deleted_file(link: str) -> bool:
    """Tell whether the file had a name in a file system once: one that never had a name is dumped as memory."""
    return link.endswith(_DELETED) and not link.startswith(_NAMELESS)


def _fds(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []  # a zombie has no descriptors


def _protocol(path: str) -> str:
    """Return the kernel's name of the protocol; empty when the kernel does not report it."""
    try:
        return os.getxattr(path, "system.sockprotoname").rstrip(b"\0").decode("ascii", "replace")
    except OSError:
        return ""
