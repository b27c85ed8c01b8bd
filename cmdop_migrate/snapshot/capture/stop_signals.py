"""Exchange the signal that stopped a process for one that CRIU dumps.

CRIU refuses a process that its terminal has stopped (SIGTTIN, SIGTTOU: `cat &`,
`vim f &`). In a frozen cgroup SIGCONT and SIGSTOP, sent one after the other,
leave it stopped by SIGSTOP: it does not run in between, and when it is thawed
it stops before its first instruction. Its parent is notified of the stop once
more.

The signals are put back however the dump ends; if this command is killed, by the
session's holder (`holder/stopped_jobs.py`). Killed in the microseconds between
SIGCONT and SIGSTOP, the command leaves a process continued, as `bg` would; the
holder stops it again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.criu.protobuf import ImageFile
from cmdop_migrate.criu.ptrace import Ended, Task
from cmdop_migrate.errors import Blocked
from cmdop_migrate.holder import cgroup, stopped_jobs
from cmdop_migrate.util import proc

_log = log.get("checkpoint")
REFUSED = (signal.SIGTTIN, signal.SIGTTOU)
_TASK, _STOP_SIGNAL = 3, 21  # in a core_entry, and in the task_core_entry there
_WALL = 0x40000000
WITHIN = 5.0


class Exchange:
    """The processes of one session whose stop signals are exchanged, and what these were.

    `directory` is that of the session, `group` its cgroup."""

    def __init__(self, directory: Path, group: str) -> None:
        self._directory, self._group = str(directory), group
        self._numbers: dict[int, int] = {}  # signals, by the session's own pids

    def make(self) -> None:
        """Exchange the signals of those processes that CRIU would refuse; the session is frozen. Raises Blocked when
        the disk is full."""
        before = {}
        for pid in cgroup.pids(self._group):
            status = _status(pid)
            if _is_stopped(status) and (number := _stop_signal(pid)) in REFUSED:
                before[pid] = number
                self._numbers[int(status["NSpid"].split()[-1])] = number
        if not before:
            return
        try:
            stopped_jobs.write(self._directory, before)
        except OSError as error:
            raise Blocked(
                f"{self._directory} cannot be written: {error.strerror}",
                "The session goes on. Free some space where state_dir is, then checkpoint again.",
            ) from error
        for pid in before:
            stopped_jobs.stop_by(pid, signal.SIGSTOP)

    def write(self, images: Path) -> None:
        """Put the true signals into the images of the dump: a restored process is stopped by the one it was."""
        write(images, self._numbers)

    def undo(self) -> None:
        """Stop the processes by their own signals again, unless the holder has done so already. The signals have the
        effect they had: a stopped process has not blocked or handled them meanwhile."""
        stopped_jobs.put_back(self._directory, self._group)


def write(images: Path, numbers: Mapping[int, int]) -> None:
    """Write the signals, by the session's own pids, into the images. Raises Malformed."""
    for process, number in numbers.items():
        image = ImageFile(images / f"core-{process}.img")
        task = image.records[0].inner(_TASK)
        if task is not None:
            task.set(_STOP_SIGNAL, number)
            image.records[0].set(_TASK, task)
            image.save()


def _stop_signal(pid: int) -> int:
    """-> the signal that has stopped it, which only a tracer is told. A stopped process stays stopped while and after
    it is traced. 0 when it is not stopped, or another process traces it, which CRIU will report."""
    task = Task(pid)
    try:
        task.attach()
        status = _soon(lambda: os.waitpid(pid, _WALL | os.WNOHANG)[1])
        task.let_go()
        # CRIU counts the stops of a process that it finds on its way back into the stop, and waits for one too many.
        _soon(lambda: _is_stopped(_status(pid)))
    except (Ended, ChildProcessError, ProcessLookupError) as error:
        _log.warning("process %d is stopped, but not known by what: %s", pid, error)
        return 0
    return os.WSTOPSIG(status) if os.WIFSTOPPED(status) and status >> 16 else 0


def _soon(read: Callable[[], int]) -> int:
    """-> the first value that is not 0."""
    until = time.monotonic() + WITHIN
    while not (value := read()):
        if time.monotonic() > until:
            raise Ended("it does not stop")
        time.sleep(0.0005)
    return value


def _is_stopped(status: Mapping[str, str]) -> bool:
    return status.get("State", "").startswith("T")  # with a small letter it is traced


def _status(pid: int) -> dict[str, str]:
    try:
        return proc.status(pid)
    except (FileNotFoundError, ProcessLookupError):
        return {}
