"""Exchange the signal that stopped a process for one that CRIU can dump.

CRIU refuses a process that its terminal has stopped (SIGTTIN, SIGTTOU: `cat &`,
`vim f &`). In a frozen cgroup SIGCONT and SIGSTOP, sent one after the other,
leave it stopped by SIGSTOP: it does not run in between, and when it is thawed
it stops before its first instruction. Its parent is notified of the stop once
more.

The original signals are restored also when the dump fails; if this command is
killed, the session's holder restores them (`holder/stopped_jobs.py`). If it is
killed in the microseconds between SIGCONT and SIGSTOP, it leaves a process
continued, as `bg` would; the holder stops that process again.
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
STOP_TIMEOUT = 5.0


class StopSignalExchange:
    """Exchange the stop signals of one session's processes, and remember the original ones.

    `directory` is the session's directory, `group` its cgroup."""

    def __init__(self, directory: Path, group: str) -> None:
        self._directory, self._group = str(directory), group
        self._numbers: dict[int, int] = {}  # signals, by the session's own pids

    def make(self) -> None:
        """Exchange the signals of the processes that CRIU would refuse; the session is frozen. Raises Blocked if the
        disk is full."""
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
                "The session keeps running. Free some space where state_dir is, then checkpoint again.",
            ) from error
        for pid in before:
            stopped_jobs.stop_by(pid, signal.SIGSTOP)

    def write(self, images: Path) -> None:
        """Write the original signals into the images of the dump: a restored process is stopped by its original
        signal."""
        write(images, self._numbers)

    def undo(self) -> None:
        """Stop the processes by their original signals again, unless the holder has done so already. The signals have
        the same effect as before: a stopped process cannot have blocked or handled them meanwhile."""
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
    """Return the signal that stopped a process, which the kernel reports only to a tracer. A stopped process stays
    stopped while and after it is traced. Return 0 if the process is not stopped, or if another process traces it,
    which CRIU will report."""
    task = Task(pid)
    try:
        task.attach()
        status = _wait_for(lambda: os.waitpid(pid, _WALL | os.WNOHANG)[1])
        task.let_go()
        # CRIU would wait for one stop too many if it found the process on its way back into the stop.
        _wait_for(lambda: _is_stopped(_status(pid)))
    except (Ended, ChildProcessError, ProcessLookupError) as error:
        _log.warning("process %d is stopped by an unknown signal: %s", pid, error)
        return 0
    return os.WSTOPSIG(status) if os.WIFSTOPPED(status) and status >> 16 else 0


def _wait_for(read: Callable[[], int]) -> int:
    """Call `read` until it returns a value that is not 0, and return that. Raises Ended after STOP_TIMEOUT."""
    until = time.monotonic() + STOP_TIMEOUT
    while not (value := read()):
        if time.monotonic() > until:
            raise Ended("the process does not stop")
        time.sleep(0.0005)
    return value


def _is_stopped(status: Mapping[str, str]) -> bool:
    return status.get("State", "").startswith("T")  # "t" is a traced process


def _status(pid: int) -> dict[str, str]:
    try:
        return proc.status(pid)
    except (FileNotFoundError, ProcessLookupError):
        return {}
