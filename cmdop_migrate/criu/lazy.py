"""`criu lazy-pages`: fills a restored session's memory while it runs.

The daemon gets its page server as an inherited socket (`--ps-socket`): no
port, nothing another user of the machine could connect to.

What must never happen is that the daemon ends early. The kernel then hands the
session zero pages for all that is missing, and it runs on with holes in its
memory. So whoever starts the daemon also holds a copy of every userfaultfd it
has (`secure`, at `pre-resume`, before the session runs): while one is open a
thread that touches a missing page stays blocked, and `guard` has the time to
freeze or kill the session first. A copy may not outlive the daemon's own: it
would block pages that are missing by right; `guard` drops them as they close.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cmdop_migrate.criu import logs
from cmdop_migrate.criu.runner import end
from cmdop_migrate.errors import CriuFailed, TimedOut

LOG_FILE = "lazy-pages.log"
_PIDFD_GETFD = 438  # the same on every architecture
_UFFD = "anon_inode:[userfaultfd]"


class State(enum.Enum):
    RUNNING = "running"
    FINISHED = "finished"  # every page is in place
    LOST = "lost"  # it ended early; what it had not filled is held


class LazyPages:
    """One daemon, for one restore. Also a context manager, which ends it and lets go of what is held."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.process = process
        self.log_path = log_path
        self._pidfd = os.pidfd_open(process.pid)
        self._held: dict[int, int] = {}  # the daemon's number -> our copy

    @classmethod
    def start(cls, criu: Sequence[str], images: Path, pages: socket.socket, timeout: float = 10.0) -> LazyPages:
        """Start it and wait until it takes requests. `pages` is its end of a stream pair whose other end `pages.serve`
        reads; closed here. The restore must use `images` as its work dir too: the two meet at a socket there."""
        ready, theirs = os.pipe2(os.O_CLOEXEC)
        command = [*criu, "lazy-pages", "-D", str(images), "-W", str(images), "-o", LOG_FILE, "-v2", "--page-server"]
        command += ["--ps-socket", str(pages.fileno()), "--status-fd", str(theirs)]
        with contextlib.closing(pages), os.fdopen(ready, "rb", buffering=0) as status:
            try:
                process = subprocess.Popen(
                    command,
                    pass_fds=(pages.fileno(), theirs),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            finally:
                os.close(theirs)
            log_path = images / LOG_FILE
            if not select.select([status], [], [], timeout)[0]:
                end(process, 0)
                raise TimedOut("criu lazy-pages did not get ready", f"See its log, {log_path}.")
            if status.read(1) != b"\0":
                end(process)
                raise logs.failure("criu lazy-pages did not start", log_path)
        return cls(process, log_path)

    def hold(self) -> int:
        """Copy the userfaultfds the daemon has now, drop copies of those it closed; -> how many are held. Does nothing
        once the daemon is on its way out."""
        theirs = self._userfaultfds()
        if theirs is None:
            return len(self._held)
        for number, copy in list(self._held.items()):
            if theirs.get(number) != os.fstat(copy).st_ino:
                os.close(self._held.pop(number))
        for number in theirs.keys() - self._held.keys():
            copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, self._pidfd, number, 0)
            if copy >= 0:
                self._held[number] = copy
        return len(self._held)

    def _userfaultfds(self) -> dict[int, int] | None:
        """Number -> inode. None when the daemon is ending: its table goes as a whole, an empty one says just that."""
        folder, found = f"/proc/{self.process.pid}/fd", dict[int, int]()
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None
        for name in names:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if os.readlink(f"{folder}/{name}") == _UFFD:
                    found[int(name)] = os.stat(f"{folder}/{name}").st_ino
        return found if names and os.path.exists(f"{folder}/0") else None

    def poll(self) -> State:
        """Where it stands, with `hold` brought up to date. FINISHED has let go of everything, LOST of nothing."""
        if self.process.poll() is None:
            self.hold()
            return State.RUNNING
        if self.process.returncode:
            return State.LOST
        self.release()
        return State.FINISHED

    def secure(self, timeout: float = 10.0) -> bool:
        """For `pre-resume`: everything is held, or was filled already; False: it failed, the session must not run."""
        while (theirs := self._userfaultfds()) is not None:
            self.hold()
            if self._held.keys() >= theirs.keys():
                return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        return self.poll() is State.FINISHED

    def guard(self, on_lost: Callable[[CriuFailed], None], interval: float = 0.01) -> State:
        """Stay with it until it ends; meant for a thread. When it ends early, `on_lost` must freeze or kill the
        session; only after that are the copies let go."""
        while (state := self.poll()) is State.RUNNING:
            time.sleep(interval)
        if state is State.LOST:
            on_lost(logs.failure("criu lazy-pages ended before all memory was in place", self.log_path))
            self.release()
        return state

    def release(self) -> None:
        for copy in self._held.values():
            os.close(copy)
        self._held.clear()

    def stop(self) -> None:
        """End it, whatever it does. What it had not filled reads as zeros from now on: the session must be gone."""
        end(self.process, 0)
        self.release()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __enter__(self) -> LazyPages:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
