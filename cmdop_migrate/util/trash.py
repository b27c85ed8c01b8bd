"""Remove large directory trees without making a command wait for it.

A session's upper layer may hold 100,000 files, and removing them takes minutes. So a tree is renamed into
STATE_DIR/trash, which takes one system call, and removed from there: by a detached process, or, where that was killed,
by the next command for a bounded time. Stdlib only: the holder loads this.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time

from cmdop_migrate.util import locks

NAME = "trash"
FOREGROUND_SECONDS = 0.1  # of removing by the process that has set a tree aside, or by one that sweeps
CLOCK_CHECK_EVERY = 64  # entries removed between two looks at the clock
NICE = 19
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from cmdop_migrate.util.trash import main; main()"


def of_session(directory: str) -> str:
    """Return the trash of the host whose session has this directory: STATE_DIR/sessions/ID."""
    return os.path.join(os.path.dirname(os.path.dirname(directory)), NAME)


def set_aside(trash: str, path: str) -> bool:
    """Rename `path` into the trash. False when there is nothing at `path`, or it cannot be renamed: the caller then
    removes it where it is."""
    if not os.path.lexists(path):
        return False
    try:
        os.makedirs(trash, mode=0o700, exist_ok=True)
        os.rename(path, f"{trash}/{_fresh()}")
    except OSError:  # a full disk, or something is mounted there
        return False
    return True


def is_empty(trash: str) -> bool:
    try:
        with os.scandir(trash) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True


def remove(trash: str, seconds: float | None = FOREGROUND_SECONDS) -> bool:
    """Remove what is in the trash, for at most `seconds`. True when nothing is left that can be removed, or another
    process is at it.

    No path is followed: every directory is opened by name in its parent, without following symbolic links, and its
    subdirectories are first renamed to the top of the trash. So no depth is too great, and what was done stays done.
    """
    try:
        top = os.open(trash, _FOLDER)
    except OSError:
        return True
    try:
        if not locks.try_lock(top):
            return True
        return _Remover(top, None if seconds is None else time.monotonic() + seconds).run()
    finally:
        os.close(top)


def remove_later(trash: str) -> None:
    """Remove what is in the trash: for a moment here, and the rest by a detached process."""
    if remove(trash):
        return
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    arguments = [sys.executable, "-I", "-S", "-c", _BOOT, package, trash]
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    streams = [(os.POSIX_SPAWN_DUP2, null, number) for number in range(3)]
    with contextlib.suppress(OSError):  # no more processes: the next command that sweeps continues
        os.waitpid(os.posix_spawn(sys.executable, arguments, {}, file_actions=streams, setsid=True), 0)
    os.close(null)


def make_room(state_dir: str, needed: int) -> int:
    """Return the bytes that are free where `state_dir` is; when that is less than `needed`, empty the trash before."""
    free = _free(state_dir)
    if free < needed and not is_empty(f"{state_dir}/{NAME}"):
        remove(f"{state_dir}/{NAME}", None)
        free = _free(state_dir)
    return free


def _free(path: str) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _fresh() -> str:
    return os.urandom(8).hex()


class _OutOfTime(Exception):
    """Signal that the time is over: the next sweep removes the rest."""


class _Remover:
    """Remove the entries of a trash directory, `top`, whose lock the caller holds."""

    def __init__(self, top: int, until: float | None) -> None:
        self._top, self._until, self._count = top, until, 0

    def run(self) -> bool:
        stuck: set[str] = set()  # an immutable file, for example: not tried again and again
        try:
            while names := [name for name in os.listdir(self._top) if name not in stuck]:
                for name in names:
                    if not self._remove(name):
                        stuck.add(name)
        except _OutOfTime:
            return False
        return True

    def _remove(self, name: str) -> bool:
        """Remove one entry of the top. Return False if a part of it cannot be removed."""
        try:
            folder = os.open(name, _FOLDER, dir_fd=self._top)
        except OSError as error:
            return error.errno in (errno.ENOTDIR, errno.ELOOP) and self._unlink(name, self._top)
        try:
            for entry in os.listdir(folder):  # not scandir: renaming while it reads may skip entries
                self._tick()
                if not self._unlink(entry, folder):
                    with contextlib.suppress(OSError):  # then rmdir fails below
                        os.rename(entry, _fresh(), src_dir_fd=folder, dst_dir_fd=self._top)
            os.rmdir(name, dir_fd=self._top)
        except OSError:
            return False
        finally:
            os.close(folder)
        return True

    def _unlink(self, name: str, folder: int) -> bool:
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _tick(self) -> None:
        self._count += 1
        if self._until is not None and self._count % CLOCK_CHECK_EVERY == 0 and time.monotonic() > self._until:
            raise _OutOfTime


def main() -> None:
    """Remove the trash of argv[2] in a fork, so that no caller has a child to wait for. argv[1] is the package's
    parent."""
    if os.fork():
        return
    with contextlib.suppress(OSError):
        os.nice(NICE)
    remove(sys.argv[2], None)
