"""Serve the fork server: load all modules once, and fork for each command that a client sends (client.py).

    python -m cmdop_migrate.cli.forkserver.server       a child of the agent; exits when its standard input ends

The server does no work itself: it receives requests, forks, and reports how forks ended that could not report it. No
request waits for another. It has one thread, and holds no connection, lock or key of a session.
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

REQUEST_TIMEOUT = 1.0  # seconds for a client to send its request
LOADING_NICE = 19  # no client waits for the loading
OOM_SCORE = b"500"  # the kernel kills it before sessions when memory runs out
CAP_SYS_NICE = 23
S3 = "s3://"
# What the commands of client.COMMANDS load, at import or later. boto3 is not among it: see _load_s3.
MODULES = (
    "cmdop_migrate.cli.main",
    "cmdop_migrate.cli.commands.checkpoints.checkpoint",
    "cmdop_migrate.cli.commands.checkpoints.checkpoints",
    "cmdop_migrate.cli.commands.checkpoints.fork",
    "cmdop_migrate.cli.commands.checkpoints.restore",
    "cmdop_migrate.cli.commands.moves.plan",
    "cmdop_migrate.cli.commands.sessions.ls",
    "cmdop_migrate.cli.commands.sessions.output",
    "cmdop_migrate.cli.commands.sessions.send",
    "cmdop_migrate.cli.commands.sessions.show",
    "cmdop_migrate.gateway.client",
    "cmdop_migrate.host.agent_process",
    "cmdop_migrate.host.references",
    "cmdop_migrate.host.session_lock",
    "cmdop_migrate.migration.peers",
    "cmdop_migrate.migration.remote_restore",
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
    """Collect the request of one client."""

    until: float
    received: bytes = b""

    def request(self) -> bytes | None:
        """Return the body once it is complete, None before. Raise ValueError if it is malformed."""
        head, line, body = self.received.partition(b"\n")
        if not line:
            if len(head) > 16:
                raise ValueError("no request")
            return None
        if int(head) > compat.MAX_REQUEST or len(body) > int(head):
            raise ValueError("no request")
        return body if len(body) == int(head) else None


class Server:
    """Accept requests on a socket and fork for each."""

    def __init__(self, listener: int, source: object) -> None:
        self._listener, self._source = listener, source
        self._facts = compat.of_this_process()
        self._pending: dict[int, Pending] = {}
        self._working: dict[int, tuple[int, int]] = {}  # pidfd of a fork -> (its pid, the connection of its client)
        self._wants_s3 = False

    def serve(self) -> None:
        """Serve until the agent is gone, or the installed code is not the loaded code any more."""
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
            for fd in [fd for fd, pending in self._pending.items() if now >= pending.until]:
                self._drop(fd)
            if self._wants_s3 and not self._pending and not poll.poll(0):
                self._wants_s3 = False
                _load_s3()

    def _pause(self) -> float | None:
        if not self._pending:
            return 0 if self._wants_s3 else None
        return max(0.0, min(pending.until for pending in self._pending.values()) - time.monotonic()) * 1000 + 1

    def _accept(self) -> None:
        with socket.socket(fileno=os.dup(self._listener)) as listener:
            try:
                connection, _ = listener.accept()
            except OSError:  # the client is gone, or no descriptor is free at the moment
                return
        connection.setblocking(False)
        self._pending[connection.detach()] = Pending(time.monotonic() + REQUEST_TIMEOUT)

    def _read(self, fd: int) -> bool:
        """Read from a client, and fork if its request is complete. Return False if the installed code has changed."""
        pending = self._pending[fd]
        try:
            data = os.read(fd, 1 << 16)
            pending.received += data
            request = pending.request() if data else b""
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
        except OSError:  # no more processes: the client does the work itself
            self._drop(fd)
            return
        if pid == 0:
            child.work(fd, request, self._facts)
        del self._pending[fd]
        self._working[os.pidfd_open(pid)] = (pid, fd)
        if "boto3" not in sys.modules and names_s3(request):
            self._wants_s3 = True

    def _ended(self, fd: int) -> None:
        pid, connection = self._working.pop(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # the client is gone
            os.write(connection, b"status %d\n" % status)
        os.close(connection)

    def _drop(self, fd: int) -> None:
        del self._pending[fd]
        os.close(fd)


def names_s3(request: bytes) -> bool:
    """Return True if the request names an S3 URL in its arguments or settings. The config file is not read: the agent
    has read it and passed its settings on."""
    fields = request.split(b"\0")[4:]
    words = int(fields[0]) if fields and fields[0].isdigit() else 0
    stores = (b"CMDOP_MIGRATE_STORE=", b"CMDOP_MIGRATE_LEASE=")
    return any(S3.encode() in text for at, text in enumerate(fields) if at <= words or text.startswith(stores))


def fingerprint() -> object:
    """Return a value that changes with every file of this package and with every package installed or removed."""
    files = []
    directories = [compat.PACKAGE]
    while directories:
        with os.scandir(directories.pop()) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    seen = entry.stat()
                    files.append((entry.path, seen.st_mtime_ns, seen.st_size, seen.st_ino))
                elif entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__":
                    directories.append(entry.path)
    for place in sys.path:
        if place.endswith("-packages"):
            with contextlib.suppress(OSError):
                files.append((place, os.stat(place).st_mtime_ns, 0, 0))
    return sorted(files)


def _load() -> None:
    """Import all of MODULES."""
    for name in MODULES:
        importlib.import_module(name)


def _load_s3() -> None:
    """Load boto3, which needs half as much memory again, so only where S3 is used. Clients that ask meanwhile get no
    answer in time, and do their work themselves."""
    importlib.import_module("cmdop_migrate.storage.s3")
    importlib.import_module("cmdop_migrate.lease.s3")
    importlib.import_module("cmdop_migrate.storage.s3client").warm()
    _settle()


def _settle() -> None:
    """Exclude loaded objects from garbage collection, whose marks would copy every page in every fork."""
    gc.collect()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("a loaded module has started a thread: no fork of this process would be safe")


@contextlib.contextmanager
def _lowest_priority() -> Iterator[None]:
    """Run the block at the lowest priority, unless the priority could not be raised again."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        able = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff"))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    may = bool(able >> CAP_SYS_NICE & 1)
    if may:
        os.setpriority(os.PRIO_PROCESS, 0, LOADING_NICE)
    try:
        yield
    finally:
        if may:
            os.setpriority(os.PRIO_PROCESS, 0, before)


class Socket:
    """Own the listening socket. It gets its name only when it listens, and replaces the socket of a dead server."""

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
        """Remove the socket, unless another server has replaced it."""
        with contextlib.suppress(FileNotFoundError):
            if self._look(compat.SOCKET) == self._seen:
                os.unlink(compat.SOCKET, dir_fd=self._directory)


def main() -> None:
    """Load all modules, then serve until the agent ends."""
    source = fingerprint()  # before any of it is loaded
    syscalls.hear_of_parents_end(signal.SIGCONT)  # wakes a stopped server, which then sees its standard input end
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as mine:
        mine.write(OOM_SCORE)
    gc.disable()
    with _lowest_priority():
        _load()
        if any(S3 in os.environ.get(f"{settings.ENV_PREFIX}{key}", "") for key in ("STORE", "LEASE")):
            _load_s3()
        _settle()
    place = Socket(str(settings.load().run_dir))
    try:
        Server(place.fd, source).serve()
    finally:
        place.remove()


if __name__ == "__main__":
    main()
