"""Take over the attributes that the kernel keeps for a process, from a client to the fork that does its work.

Limits, priorities, audit identity and confinement of the client hold for the fork as well. An attribute that cannot be
taken over must be equal already; if it is not, the client does the work itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import locale
import os
import platform
import resource
import signal
import time
from collections.abc import Callable

_NAMESPACES = (
    "cgroup",
    "ipc",
    "mnt",
    "net",
    "pid",
    "pid_for_children",
    "time",
    "time_for_children",
    "user",
    "uts",
)
# Fields of /proc/PID/status that cannot be given to another process.
_FIXED = (
    "Uid",
    "Gid",
    "Groups",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
)
_SAME_FILES = ("personality", "attr/current")
_WRITTEN = ("oom_score_adj", "loginuid")
_LIMITS = [value for name, value in sorted(vars(resource).items()) if name.startswith("RLIMIT_")]
_IOPRIO = {"x86_64": (251, 252), "aarch64": (30, 31)}  # set, get
_NEVER = {signal.SIGKILL, signal.SIGSTOP}
_libc = ctypes.CDLL(None, use_errno=True)


class Differs(Exception):
    """Signal an attribute in which the two processes differ and cannot be made equal."""


class Peer:
    """Represent the client by its directory in /proc, which stays valid even if its pid is reused."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._there = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._here = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._status = _fields(_read(self._there, "status"))

    def close(self) -> None:
        os.close(self._there)
        os.close(self._here)

    def take_over(self) -> None:
        """Take over everything but signals. Raise Differs or OSError if anything stays different."""
        self._compare()
        self._join_cgroups()
        self._take_limits()
        self._take_priority()
        for name in _WRITTEN:
            self._write(name)
        os.umask(int(self._status["Umask"], 8))
        there = os.open("cwd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._there)
        os.fchdir(there)
        os.close(there)

    def _compare(self) -> None:
        for name in _NAMESPACES:
            with contextlib.suppress(FileNotFoundError):  # a kernel without it
                if self._links(f"ns/{name}", os.readlink):
                    raise Differs(f"namespace {name}")
        if self._links("root", os.readlink) or self._links("root", _identity):
            raise Differs("root directory")
        own = _fields(_read(self._here, "status"))
        for name in _FIXED:
            if own.get(name) != self._status.get(name):
                raise Differs(name)
        for name in _SAME_FILES:
            if _read_if(self._here, name) != _read_if(self._there, name):
                raise Differs(name)

    def _links(self, name: str, look: Callable[..., object]) -> bool:
        return bool(look(name, dir_fd=self._here) != look(name, dir_fd=self._there))

    def _join_cgroups(self) -> None:
        wanted, own = _read(self._there, "cgroup"), _read(self._here, "cgroup")
        if wanted == own:
            return
        mounts = _cgroup_mounts()
        for line in set(wanted.splitlines()) - set(own.splitlines()):
            _, kinds, path = line.split(":", 2)
            with open(f"{mounts[kinds]}{path}/cgroup.procs", "w", encoding="ascii") as group:
                group.write("0")
        if _read(self._here, "cgroup") != wanted:
            raise Differs("cgroup")

    def _take_limits(self) -> None:
        for number in _LIMITS:
            wanted = resource.prlimit(self.pid, number)
            if resource.getrlimit(number) != wanted:
                resource.setrlimit(number, wanted)

    def _take_priority(self) -> None:
        policy, param = os.sched_getscheduler(self.pid), os.sched_getparam(self.pid)
        if (policy, param) != (os.sched_getscheduler(0), os.sched_getparam(0)):
            os.sched_setscheduler(0, policy, param)
        nice = os.getpriority(os.PRIO_PROCESS, self.pid)
        if nice != os.getpriority(os.PRIO_PROCESS, 0):
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        cpus = os.sched_getaffinity(self.pid)
        if cpus != os.sched_getaffinity(0):
            os.sched_setaffinity(0, cpus)
        if platform.machine() in _IOPRIO:
            put, get = _IOPRIO[platform.machine()]
            wanted = _libc.syscall(get, 1, self.pid)
            if wanted != _libc.syscall(get, 1, 0) and _libc.syscall(put, 1, 0, wanted) != 0:
                raise Differs("I/O priority")

    def _write(self, name: str) -> None:
        wanted = _read_if(self._there, name)
        if wanted == _read_if(self._here, name) or wanted is None:
            return
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._here)
        try:
            os.write(fd, wanted.encode())
        finally:
            os.close(fd)

    def take_over_signals(self) -> None:
        """Ignore and block the signals that the client does; handle all others as a new interpreter does."""
        ignored, blocked = int(self._status["SigIgn"], 16), int(self._status["SigBlk"], 16)
        for number in signal.valid_signals() - _NEVER:
            if ignored >> (number - 1) & 1:
                signal.signal(number, signal.SIG_IGN)
            elif number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)
            else:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(
            signal.SIG_SETMASK, {number for number in signal.valid_signals() if blocked >> (number - 1) & 1}
        )


def read_environment_again() -> None:
    """Apply environment variables that a process reads at its start and can read again: time zone and locale."""
    time.tzset()
    with contextlib.suppress(locale.Error):  # not installed: an interpreter ignores that, too
        locale.setlocale(locale.LC_CTYPE, "")


def _cgroup_mounts() -> dict[str, str]:
    """Return the mount point of each cgroup hierarchy by its name in /proc/PID/cgroup, which is empty for v2."""
    points: dict[str, str] = {}
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape", newline="\n") as mounts:
        for line in mounts:
            _, place, kind, options, *_ = line.split(" ")
            if kind == "cgroup2":
                points.setdefault("", place)
            elif kind == "cgroup":
                words = options.split(",")
                with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as own:
                    for line_of_own in own:
                        kinds = line_of_own.split(":", 2)[1]
                        if kinds and set(kinds.split(",")) <= set(words):
                            points.setdefault(kinds, place)
    return points


def _identity(name: str, dir_fd: int) -> tuple[int, int]:
    seen = os.stat(name, dir_fd=dir_fd)
    return seen.st_dev, seen.st_ino


def _read(directory: int, name: str) -> str:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    with open(fd, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _read_if(directory: int, name: str) -> str | None:
    """Return the content, or None if this kernel has no such file."""
    try:
        return _read(directory, name)
    except OSError:
        return None


def _fields(status: str) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
