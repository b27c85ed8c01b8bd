"""Read and set the I/O priority and the timer slack of a session's threads, which CRIU does not carry.

Without this a program that was started with `ionice -c idle` competes with all others after a restore.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable
from pathlib import Path

from cmdop_migrate.session import cpu_affinity

Settings = dict[str, dict[str, int]]  # by the thread's innermost number, as text: JSON's keys are texts
_SET, _GET = {"x86_64": (251, 252), "aarch64": (30, 31)}.get(platform.machine(), (None, None))
_PROCESS = 1  # IOPRIO_WHO_PROCESS: one thread
_USUAL_SLACK = 50_000  # nanoseconds, of every thread that did not change it or inherit another
_libc = ctypes.CDLL(None, use_errno=True)


def read(pids: Iterable[int]) -> Settings:
    """Return the settings of the threads of these processes that are not the usual ones."""
    found: Settings = {}
    for inner, thread in cpu_affinity.threads(pids):
        own = {"io": _io_priority(thread), "slack": _slack(thread)}
        usual = {"io": 0, "slack": _USUAL_SLACK}
        if other := {name: value for name, value in own.items() if value not in (None, usual[name])}:
            found[inner] = other
    return found


def apply(pids: Iterable[int], wanted: Settings) -> None:
    """Set what `read` has returned earlier or on another machine. Best effort: no thread is ended for it."""
    if not wanted:
        return
    for inner, thread in cpu_affinity.threads(pids):
        own = wanted.get(inner, {})
        if "io" in own and _SET is not None:
            _libc.syscall(_SET, _PROCESS, thread, own["io"])
        if "slack" in own:
            try:
                Path(f"/proc/{thread}/timerslack_ns").write_text(str(own["slack"]))
            except OSError:
                continue  # a kernel without it, or a thread that has ended


def _io_priority(thread: int) -> int | None:
    """Return the class and level of a thread as ioprio_get(2) does; None: not available."""
    found = _libc.syscall(_GET, _PROCESS, thread) if _GET is not None else -1
    return int(found) if found >= 0 else None


def _slack(thread: int) -> int | None:
    try:
        return int(Path(f"/proc/{thread}/timerslack_ns").read_text()) or None  # 0: of a real-time thread
    except (OSError, ValueError):
        return None
