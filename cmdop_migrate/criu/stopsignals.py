"""Exchange the signal that stopped a process for one that CRIU dumps.

CRIU refuses a process that its terminal has stopped (SIGTTIN, SIGTTOU: `cat &`,
`vim f &`). In a frozen cgroup SIGCONT and SIGSTOP, sent one after the other,
leave it stopped by SIGSTOP: it does not run in between, and when it is thawed
it stops before its first instruction. Its parent hears of the stop once more.

Killed between the two signals, we leave the process continued, as `bg` would;
it is stopped again when it next turns to its terminal.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.criu.ctty import Ended, Task
from cmdop_migrate.criu.imagerecords import ImageFile

_log = log.get("criu")
REFUSED = (signal.SIGTTIN, signal.SIGTTOU)
_TASK, _STOP_SIGNAL = 3, 21  # in a core_entry, and in the task_core_entry there
_WALL = 0x40000000
WITHIN = 5.0


class Exchange:
    """The processes of one session whose stop signals are exchanged, and what these were."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}  # pid: signal
        self._numbers: dict[int, int] = {}  # the same, by the session's own pids

    def make(self, pids: Iterable[int]) -> None:
        """Exchange the signals of those of these frozen processes that CRIU would refuse."""
        for pid in pids:
            status = _status(pid)
            if _is_stopped(status) and (number := _stop_signal(pid)) in REFUSED:
                self._before[pid] = number
                self._numbers[int(status["NSpid"].split()[-1])] = number
                _stop_by(pid, signal.SIGSTOP)

    def write(self, images: Path) -> None:
        """Put the true signals into the images of the dump: a restored process is stopped by the one it was."""
        write(images, self._numbers)

    def undo(self) -> None:
        """Give the processes, which are frozen still, their own signals again. They are as when these stopped them: a
        stopped process cannot block or handle a signal meanwhile."""
        for pid, number in self._before.items():
            _stop_by(pid, number)
        self._before = {}


def write(images: Path, numbers: Mapping[int, int]) -> None:
    for process, number in numbers.items():
        image = ImageFile(images / f"core-{process}.img")
        task = image.records[0].inner(_TASK)
        if task is not None:
            task.set(_STOP_SIGNAL, number)
            image.records[0].set(_TASK, task)
            image.save()


def _stop_by(pid: int, number: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _stop_signal(pid: int) -> int:
    """-> the signal that has stopped it; only a tracer is told. A stopped process stays stopped while it is traced, and
    after that. 0 when it is not stopped, or is traced by somebody else: CRIU will say so."""
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
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as lines:
            return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    except (FileNotFoundError, ProcessLookupError):
        return {}
