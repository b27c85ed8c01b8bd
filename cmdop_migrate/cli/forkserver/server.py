"""The ready process: has everything loaded, and forks for each command that is handed to it (entry.py).

    python -m cmdop_migrate.cli.forkserver.server       a child of the agent's, gone when its standard input ends

It does no work of its own: it takes requests, forks, and says how forks ended
that could not say so themselves. No request waits for another. It has one
thread and holds no connection, lock or key of anybody's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from cmdop_migrate import config as settings
from cmdop_migrate.cli.forkserver import child, compat
from cmdop_migrate.holder import syscalls

SILENCE = 1.0  # so long a request may take to come
LOADING = 19  # its niceness: nobody waits for it
DISPENSABLE = b"500"  # when memory runs out, before others
CAP_SYS_NICE = 23
S3 = "s3://"
# What the commands of entry.COMMANDS load, now or when they come to it. boto3 is not among it: see _load_s3.
MODULES = (
    "cmdop_migrate.cli.main",
    "cmdop_migrate.cli.commands.checkpoint",
    "cmdop_migrate.cli.commands.plan",
    "cmdop_migrate.cli.commands.run",
    "cmdop_migrate.cli.commands.attach",
    "cmdop_migrate.gateway.client",
    "cmdop_migrate.host.agent_process",
    "cmdop_migrate.host.references",
    "cmdop_migrate.host.session_lock",
    "cmdop_migrate.migration.peers",
    "cmdop_migrate.remote.sshconfig",
    "cmdop_migrate.lease.sqlite",
    "cmdop_migrate.storage.local",
    "encodings.idna",
    "ipaddress",
    "psutil",
    "tomllib",
    "traceback",
)


@dataclass
class Pending:
    """One who is still saying what it wants."""

    until: float
    said: bytes = b""

    def request(self) -> bytes | None:
        """Its body, once it is all here. ValueError when it is none."""
        head, line, body = self.said.partition(b"\n")
        if not line:
            if len(head) > 16:
                raise ValueError("no request")
            return None
        if int(head) > compat.MAX_REQUEST or len(body) > int(head):
            raise ValueError("no request")
        return body if len(body) == int(head) else None


class Ready:
    def __init__(self, listener: int, source: object) -> None:
        self._listener, self._source = listener, source
        self._own = compat.of_this_process()
        self._pending: dict[int, Pending] = {}
        self._working: dict[int, tuple[int, int]] = {}  # the descriptor of a fork -> (its pid, its client's connection)
        self._wants_s3 = False

    def serve(self) -> None:
        """Until the agent is gone, or what was loaded is not what is installed any more."""
        while True:
            poll = select.poll()
            for fd in (0, self._listener, *self._pending, *self._working):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(self._pause()):
                if fd == 0:
                    return
                if fd == self._listener:
                    self._accept()
                elif fd in self._working:
                    self._ended(fd)
                elif fd in self._pending and not self._read(fd):
                    return
            now = time.monotonic()
            for fd in [fd for fd, one in self._pending.items() if now >= one.until]:
                self._drop(fd)
            if self._wants_s3 and not self._pending and not poll.poll(0):
                self._wants_s3 = False
                _load_s3()

    def _pause(self) -> float | None:
        if not self._pending:
            return 0 if self._wants_s3 else None
        return max(0.0, min(one.until for one in self._pending.values()) - time.monotonic()) * 1000 + 1

    def _accept(self) -> None:
        with socket.socket(fileno=os.dup(self._listener)) as listener:
            try:
                connection, _ = listener.accept()
            except OSError:  # gone already, or no more descriptors: the next may fare better
                return
        connection.setblocking(False)
        self._pending[connection.detach()] = Pending(time.monotonic() + SILENCE)

    def _read(self, fd: int) -> bool:
        """False when this process is of no more use to anybody."""
        one = self._pending[fd]
        try:
            data = os.read(fd, 1 << 16)
            one.said += data
            request = one.request() if data else b""
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            request = b""
        if request is None:
            return True
        if not request:
            self._drop(fd)
        elif fingerprint() != self._source:
            self._drop(fd)
            return False
        else:
            self._fork(fd, request)
        return True

    def _fork(self, fd: int, request: bytes) -> None:
        try:
            pid = os.fork()
        except OSError:  # no more processes; the client tries in its own
            self._drop(fd)
            return
        if pid == 0:
            child.work(fd, request, self._own)
        del self._pending[fd]
        self._working[os.pidfd_open(pid)] = (pid, fd)
        if "boto3" not in sys.modules and names_s3(request):
            self._wants_s3 = True

    def _ended(self, fd: int) -> None:
        pid, connection = self._working.pop(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # its client does not wait for it any more
            os.write(connection, b"status %d\n" % status)
        os.close(connection)

    def _drop(self, fd: int) -> None:
        del self._pending[fd]
        os.close(fd)


def names_s3(request: bytes) -> bool:
    """In its words, or as a setting. A settings file is not read: the agent's own says it for that."""
    fields = request.split(b"\0")[4:]
    words = int(fields[0]) if fields and fields[0].isdigit() else 0
    stores = (b"CMDOP_MIGRATE_STORE=", b"CMDOP_MIGRATE_LEASE=")
    return any(S3.encode() in one for number, one in enumerate(fields) if number <= words or one.startswith(stores))


def fingerprint() -> object:
    """Of the code that is installed: changes with every file of ours, and with every package that comes or goes."""
    found = []
    directories = [compat.PACKAGE]
    while directories:
        with os.scandir(directories.pop()) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    seen = entry.stat()
                    found.append((entry.path, seen.st_mtime_ns, seen.st_size, seen.st_ino))
                elif entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__":
                    directories.append(entry.path)
    for place in sys.path:
        if place.endswith("-packages"):
            with contextlib.suppress(OSError):
                found.append((place, os.stat(place).st_mtime_ns, 0, 0))
    return sorted(found)


def _load() -> None:
    for name in MODULES:
        importlib.import_module(name)


def _load_s3() -> None:
    """Half as much again, so only where somebody uses it. Who asks meanwhile does its work itself."""
    importlib.import_module("cmdop_migrate.storage.s3")
    importlib.import_module("cmdop_migrate.lease.s3")
    importlib.import_module("cmdop_migrate.storage.s3client").warm()
    _settle()


def _settle() -> None:
    """What was loaded is never looked through by the collector, whose marks would copy every page in every fork."""
    gc.collect()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("something that was loaded has started a thread: no fork of this process would be safe")


@contextlib.contextmanager
def _behind_all_others() -> Iterator[None]:
    """While it lasts; not where it could not be taken back."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        able = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff"))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    may = bool(able >> CAP_SYS_NICE & 1)
    if may:
        os.setpriority(os.PRIO_PROCESS, 0, LOADING)
    try:
        yield
    finally:
        if may:
            os.setpriority(os.PRIO_PROCESS, 0, before)


class Socket:
    """Where requests come. It is in its place only when there is somebody to answer, and takes that of a dead one."""

    def __init__(self, run_dir: str) -> None:
        self._directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        name = f".ready.{os.getpid()}"
        before = os.umask(0o177)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.setblocking(False)
                listener.bind(f"/proc/self/fd/{self._directory}/{name}")
                listener.listen(64)
                self._seen = self._look(name)
                os.rename(name, compat.SOCKET, src_dir_fd=self._directory, dst_dir_fd=self._directory)
                self.fd = listener.detach()
        finally:
            os.umask(before)

    def _look(self, name: str) -> tuple[int, int]:
        seen = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        assert stat.S_ISSOCK(seen.st_mode)
        return seen.st_dev, seen.st_ino

    def remove(self) -> None:
        """Unless it is another's by now."""
        with contextlib.suppress(FileNotFoundError):
            if self._look(compat.SOCKET) == self._seen:
                os.unlink(compat.SOCKET, dir_fd=self._directory)


def main() -> None:
    source = fingerprint()  # before anything of it is loaded
    syscalls.hear_of_parents_end(signal.SIGCONT)  # it is seen at our standard input, by who is not stopped
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as mine:
        mine.write(DISPENSABLE)
    gc.disable()
    with _behind_all_others():
        _load()
        if any(S3 in os.environ.get(f"{settings.ENV_PREFIX}{key}", "") for key in ("STORE", "LEASE")):
            _load_s3()
        _settle()
    place = Socket(str(settings.load().run_dir))
    try:
        Ready(place.fd, source).serve()
    finally:
        place.remove()


if __name__ == "__main__":
    main()
