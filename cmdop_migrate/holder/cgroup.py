"""Freeze, count and kill all processes of a session through its cgroup v2 group."""

from __future__ import annotations

import contextlib
import errno
import os
import time

# The errors for a group that is being removed; and for a threaded one, whose processes the group above it lists.
_GONE = (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP)


def mount_point() -> str | None:
    """Return where cgroup v2 is mounted: /sys/fs/cgroup, or a sub-mount on machines that mix v1 and v2. None:
    nowhere."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape", newline="\n") as mounts:
        for line in mounts:
            fields = line.split(" ")
            if fields[2] == "cgroup2":
                return fields[1]
    return None


def path_of(mount: str, host_id: str, session: str) -> str:
    """Return the directory of a session's group."""
    return f"{mount}/cmdop-migrate/{host_id}/{session}"


def create(path: str) -> None:
    os.makedirs(path, exist_ok=True)


def join(path: str, pid: int = 0) -> None:
    """Move a process (0: the caller) into the group. Do so before its first fork, or CRIU meets a half-frozen tree."""
    _write(f"{path}/cgroup.procs", str(pid))


def pids(path: str) -> list[int]:
    """Return every process of the group and of the groups below it, by its number in this pid namespace; nothing if the
    group is gone."""
    try:
        with open(f"{path}/cgroup.procs", encoding="ascii") as procs:
            own = [int(line) for line in procs if line.strip() != "0"]
        inner = inner_groups(path)
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise
    return own + [pid for name in inner for pid in pids(f"{path}/{name}")]


def inner_groups(path: str) -> list[str]:
    """Return the names of the groups directly below this one."""
    if os.stat(path).st_nlink <= 2:  # a directory has one link more for each directory in it
        return []
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))


def freeze(path: str, timeout: float = 10.0) -> bool:
    """Freeze every process and wait until all are frozen. Return False if that takes longer than `timeout`."""
    _write(f"{path}/cgroup.freeze", "1")
    until = time.monotonic() + timeout
    while not is_frozen(path):
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def order_freeze(path: str) -> None:
    """Order the freeze without waiting for it: each process stops at its next return to user space."""
    try:
        _write(f"{path}/cgroup.freeze", "1")
    except FileNotFoundError:
        return  # the session has just ended


def thaw(path: str) -> None:
    _write(f"{path}/cgroup.freeze", "0")


def cpu_seconds(path: str) -> float:
    """Return the processor time that its processes have used so far; 0 if the group is gone."""
    try:
        with open(f"{path}/cpu.stat", encoding="ascii") as stats:
            for line in stats:
                name, _, value = line.partition(" ")
                if name == "usage_usec":
                    return int(value) / 1e6
    except OSError:
        return 0.0
    return 0.0


class Grip:
    """Hold on to this group, and not to one that is made later at the same path. Raise FileNotFoundError if it does
    not exist."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Grip:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def freeze(self) -> None:
        self._order("cgroup.freeze")

    def kill(self) -> None:
        dumpers = _Dumpers(_threads("cgroup.threads", self._fd))
        self._order("cgroup.kill")
        dumpers.kill()

    def _order(self, name: str) -> None:
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._fd)
        except FileNotFoundError:
            return  # the group is gone
        try:
            os.write(fd, b"1")
        except OSError as error:
            if error.errno != errno.ENODEV:  # it was removed between open and write
                raise
        finally:
            os.close(fd)


def is_frozen(path: str) -> bool:
    """Return whether every process is frozen by now."""
    return _event(path, "frozen")


def is_to_freeze(path: str) -> bool:
    """Return whether the order to freeze is in force, whether or not all processes are frozen by now."""
    try:
        with open(f"{path}/cgroup.freeze", encoding="ascii") as order:
            return order.read().strip() == "1"
    except OSError:
        return False


def is_populated(path: str) -> bool:
    return _event(path, "populated")


def is_traced(path: str) -> bool:
    """Return whether every single thread is traced by another process: then none runs its own code."""
    try:
        with open(f"{path}/cgroup.threads", encoding="ascii") as threads:
            return all(_tracer(int(line)) for line in threads)
    except OSError:  # one of them has just ended, so it was not stopped
        return False


def _tracer(thread: int) -> int:
    with open(f"/proc/{thread}/status", encoding="utf-8", errors="replace") as status:
        return next((int(line.split()[1]) for line in status if line.startswith("TracerPid:")), 0)


class _Dumpers:
    """Kill the CRIU that dumps these processes, if there is one. It must end with them: else it waits for the first of
    them, which waits for the others, which wait for CRIU to resume them."""

    def __init__(self, threads: str) -> None:
        self._pids = set()
        for thread in threads.split():
            try:
                if (pid := _tracer(int(thread))) and self._is_criu(pid):
                    self._pids.add(pid)
            except OSError:
                continue

    def _is_criu(self, pid: int) -> bool:
        with open(f"/proc/{pid}/cmdline", "rb") as words:
            return b"criu" in words.read()

    def kill(self) -> None:
        for pid in self._pids:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue


def _threads(path: str, dir_fd: int | None = None) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return ""
    with open(fd, encoding="ascii") as threads:
        try:
            return threads.read()
        except OSError:  # the group is gone
            return ""


def kill(path: str) -> None:
    """Send SIGKILL to all processes simultaneously, forks in progress included. Do nothing if the group is gone or
    empty."""
    dumpers = _Dumpers(_threads(f"{path}/cgroup.threads"))
    try:
        _write(f"{path}/cgroup.kill", "1")
    except FileNotFoundError:
        for pid in pids(path):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
    except OSError as error:
        if error.errno != errno.ENODEV:  # it was removed between open and write
            raise
    dumpers.kill()


def gate(path: str) -> str:
    """Return the group of the process that is asked about this session's input: it ends as a whole, and with the
    session."""
    return f"{path}.gate"


def remove(path: str, timeout: float = 5.0) -> bool:
    """Kill what is left and remove the group with all groups below it. Return False if it is still busy after
    `timeout`."""
    _remove(gate(path), timeout)
    return _remove(path, timeout)


def _remove(path: str, timeout: float) -> bool:
    until = time.monotonic() + timeout
    while True:
        kill(path)
        _remove_inner(path)
        try:
            os.rmdir(path)
            return True
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > until:
                return False
            time.sleep(0.002)


def _remove_inner(path: str) -> None:
    """Remove the groups that a session made below its own, the innermost first; one that is busy stays."""
    for folder, _, _ in os.walk(path, topdown=False):
        if folder != path:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _event(path: str, name: str) -> bool:
    try:
        with open(f"{path}/cgroup.events", encoding="ascii") as events:
            return any(line.split() == [name, "1"] for line in events)
    except OSError:
        return False


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
