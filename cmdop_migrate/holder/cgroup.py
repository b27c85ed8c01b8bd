"""One cgroup v2 group per session: freezing, counting and ending the whole tree at once.

Stdlib only: the holder loads this.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time

# Of a group that is removed just now; of one of threads, whose processes the group above it lists.
_GONE = (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP)


def mount_point() -> str | None:
    """Where cgroup v2 is mounted: /sys/fs/cgroup, or a sub-mount on machines that mix v1 and v2."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape", newline="\n") as mounts:
        for line in mounts:
            fields = line.split(" ")
            if fields[2] == "cgroup2":
                return fields[1]
    return None


def path_of(mount: str, host_id: str, session: str) -> str:
    return f"{mount}/cmdop-migrate/{host_id}/{session}"


def create(path: str) -> None:
    os.makedirs(path, exist_ok=True)


def join(path: str, pid: int = 0) -> None:
    """Moves a process (0: the caller) in. Before its first fork, or CRIU meets a half-frozen tree."""
    _write(f"{path}/cgroup.procs", str(pid))


def pids(path: str) -> list[int]:
    """Every process of the group and of those below it, as this pid namespace counts them; empty when the group is
    gone."""
    try:
        with open(f"{path}/cgroup.procs", encoding="ascii") as procs:
            found = [int(line) for line in procs if line.strip() != "0"]
        inner = inner_groups(path)
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise
    return found + [pid for name in inner for pid in pids(f"{path}/{name}")]


def inner_groups(path: str) -> list[str]:
    """Names of the groups that were made directly below it."""
    if os.stat(path).st_nlink <= 2:  # a directory has one more for each in it
        return []
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))


def freeze(path: str, timeout: float = 10.0) -> bool:
    """Stops every process and waits until all stand still. False when that takes longer than `timeout`."""
    _write(f"{path}/cgroup.freeze", "1")
    until = time.monotonic() + timeout
    while not is_frozen(path):
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def order_freeze(path: str) -> None:
    """Stops every process, without waiting until all have: each does at its next return to user space."""
    try:
        _write(f"{path}/cgroup.freeze", "1")
    except FileNotFoundError:
        return  # the session has just ended


def thaw(path: str) -> None:
    _write(f"{path}/cgroup.freeze", "0")


def cpu_seconds(path: str) -> float:
    """Processor time its processes have used so far; 0 when the group is gone."""
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
    """This group, and not one that is made later at the same path. FileNotFoundError when there is none."""

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
            if error.errno != errno.ENODEV:  # went between the two
                raise
        finally:
            os.close(fd)


def is_frozen(path: str) -> bool:
    return _event(path, "frozen")


def is_to_freeze(path: str) -> bool:
    """That the order to is in force, whether or not all stand still by now."""
    try:
        with open(f"{path}/cgroup.freeze", encoding="ascii") as order:
            return order.read().strip() == "1"
    except OSError:
        return False


def is_populated(path: str) -> bool:
    return _event(path, "populated")


def is_traced(path: str) -> bool:
    """That somebody traces every single thread of it: none takes a step of its own."""
    try:
        with open(f"{path}/cgroup.threads", encoding="ascii") as threads:
            return all(_tracer(int(line)) for line in threads)
    except OSError:  # one of them has just ended: it was not stopped
        return False


def _tracer(thread: int) -> int:
    with open(f"/proc/{thread}/status", encoding="utf-8", errors="replace") as status:
        return next((int(line.split()[1]) for line in status if line.startswith("TracerPid:")), 0)


class _Dumpers:
    """The CRIU, if any, that has its processes in its hands. It must end with them: waiting for the first of them,
    which waits for the others, which wait for CRIU to be looked at, it would wait for ever."""

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
    """SIGKILL to all at once, forks in flight included. No error when the group is gone or empty."""
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
        if error.errno != errno.ENODEV:  # it went between being opened and being written to
            raise
    dumpers.kill()


def gate(path: str) -> str:
    """The group of whoever is asked about this session's inputs: so that it ends whole, and with the session."""
    return f"{path}.gate"


def remove(path: str, timeout: float = 5.0) -> bool:
    """Kills what is left and removes the group, with those made below it. False if it is still busy after
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
