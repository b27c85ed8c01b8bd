"""Put back the signals that jobs of a session were stopped by, after a dump has exchanged them.

CRIU refuses a process that its terminal has stopped (SIGTTIN, SIGTTOU), so the
dump stops such processes by SIGSTOP instead (`snapshot/capture/stop_signals.py`). The signals
they were stopped by are written to a file first: the command puts them back,
and if the command is killed the session's holder does, before it thaws the session.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping

from cmdop_migrate.holder import cgroup
from cmdop_migrate.util import atomic

NAME = "dump/stopped-jobs"  # in the session's directory; goes with the images of the dump, if it is left over


def write(directory: str, signals: Mapping[int, int]) -> None:
    """Note what these processes are stopped by. Raise OSError when the disk is full."""
    jobs = [[pid, started, number] for pid, number in signals.items() if (started := _started(pid)) is not None]
    atomic.replace(f"{directory}/{NAME}", json.dumps(jobs).encode(), durable=False)


def put_back(directory: str, group: str) -> None:
    """Stop the noted processes by their own signals again, once. The cgroup is ordered to freeze for that, and stays
    so: otherwise a process would run between the two signals. Do nothing if there is no note."""
    path = f"{directory}/{NAME}"
    try:
        with open(path, "rb") as note:
            jobs = json.loads(note.read())
    except OSError:
        return
    cgroup.order_freeze(group)
    ours = set(cgroup.pids(group))
    for pid, started, number in jobs:
        if pid in ours and _started(pid) == started:
            stop_by(pid, number)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def stop_by(pid: int, number: int) -> None:
    """Stop a stopped process by another signal. In a frozen cgroup it does not run in between: it stops, by the new
    signal, before its first instruction. The second signal discards the first: no handler of SIGCONT runs."""
    try:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _started(pid: int) -> int | None:
    """Return when the process was started, in the kernel's ticks; None when it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[19])
    except OSError:
        return None
