"""Run the dump guard: a process that watches one CRIU dump a session, and repairs the session if CRIU is killed.

The guard traces CRIU. The kernel stops a traced process as it begins to exit, also after SIGKILL, and only later
releases the tasks which that process traces itself. In this stop the guard freezes the session's cgroup, so that no
process of the session executes CRIU's code; then it lets CRIU exit, and undoes what CRIU changed (put_back.py).

The guard belongs neither to the command's cgroup nor to its process group, so that nothing which kills these kills the
guard or CRIU. If the guard itself is killed, CRIU keeps working without it. The guard keeps the connection with which
the session was frozen: the holder thaws the session only when the guard has ended.

On its control socket the guard receives `snapshot` once, when the session is frozen and CRIU has not read it yet, and
answers with one JSON object; with a second object it reports the end. Standard library only: it starts beside every
dump.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from types import FrameType

from cmdop_migrate.criu import ptrace
from cmdop_migrate.criu.guard import put_back
from cmdop_migrate.holder import cgroup

FROZEN_WITHIN = 5.0
CRIU_ENDS_WITHIN = 30.0  # seconds that CRIU may take to release the session once its command has ended


class Guard:
    """Watch the CRIU with pid `criu` dump the session in cgroup `group`."""

    def __init__(self, control: socket.socket, criu: int, group: str) -> None:
        self._control, self._criu, self._group = control, criu, group
        self._snapshot: put_back.Snapshot | None = None
        self._kill_at: float | None = None
        self._signals, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # the guard ends with CRIU only
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("-1000")
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def run(self) -> None:
        """Wait for the request, record the session's state, and watch CRIU until it ends."""
        if not self._is_requested():
            return
        try:
            ptrace.seize(self._criu, ptrace.O_TRACEEXIT)
            began = time.monotonic()
            self._snapshot = put_back.Snapshot.take(self._group)
        except (OSError, ptrace.Stuck) as error:
            self._send({"guarded": False, "why": str(error)})
        else:
            self._send(
                {
                    "guarded": True,
                    "blocked_trap": self._snapshot.blocked_trap(),
                    "took_s": round(time.monotonic() - began, 6),
                }
            )
        with contextlib.suppress(OSError):
            self._watch()

    def _is_requested(self) -> bool:
        """Wait for `snapshot`; return False when CRIU or the command ends first."""
        death = os.pidfd_open(self._criu)
        try:
            ready = select.select([self._control.fileno(), death], [], [])[0]
            return self._control.fileno() in ready and self._control.recv(64) == b"snapshot"
        finally:
            os.close(death)

    def _watch(self) -> None:
        """Deliver CRIU's signals to it until it exits."""
        while True:
            status = self._next_stop()
            if not os.WIFSTOPPED(status):
                return
            if status >> 16 == ptrace.EVENT_EXIT:
                self._on_exit()
                return
            with contextlib.suppress(OSError):
                if status >> 16 == ptrace.EVENT_STOP and os.WSTOPSIG(status) != signal.SIGTRAP:
                    ptrace.listen(self._criu)
                else:
                    ptrace.resume(self._criu, 0 if status >> 16 else os.WSTOPSIG(status))

    def _next_stop(self) -> int:
        while True:
            stopped, status = os.waitpid(self._criu, ptrace.WALL | os.WNOHANG)
            if stopped:
                return status
            command = [] if self._kill_at is not None else [self._control.fileno()]
            left = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            ready = select.select([self._signals, *command], [], [], left)[0]
            with contextlib.suppress(BlockingIOError):
                os.read(self._signals, 4096)
            if self._control.fileno() in ready and not self._control.recv(64):
                self._kill_at = (
                    time.monotonic() + CRIU_ENDS_WITHIN
                )  # the command has ended: CRIU notices and ends by itself
            elif left == 0.0:
                os.kill(self._criu, signal.SIGKILL)
                self._kill_at = time.monotonic() + CRIU_ENDS_WITHIN

    def _on_exit(self) -> None:
        """Freeze the session, let CRIU exit, and repair the threads that CRIU had not released."""
        snapshot = self._snapshot
        damaged = put_back.traced_by(self._group, self._criu)
        if snapshot is not None:
            self._freeze()
        ptrace.resume(self._criu)
        while os.WIFSTOPPED(os.waitpid(self._criu, ptrace.WALL)[1]):
            ptrace.resume(self._criu)
        if snapshot is not None:
            began = time.monotonic()
            try:
                repaired, why = snapshot.release(damaged), ""
            except (OSError, ptrace.Stuck) as error:
                repaired, why = 0, str(error)
            took = round(time.monotonic() - began, 6)
            self._send({"damaged": len(damaged), "repaired": repaired, "why": why, "took_s": took})

    def _freeze(self) -> None:
        cgroup.order_freeze(self._group)
        until = time.monotonic() + FROZEN_WITHIN
        while not cgroup.is_frozen(self._group) and cgroup.is_populated(self._group) and time.monotonic() < until:
            time.sleep(ptrace.POLL_INTERVAL)

    def _send(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # the command has ended
            self._control.send(json.dumps(message).encode())


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Handle SIGCHLD: the wake-up descriptor is written because there is a handler."""


def main() -> None:
    """Run the guard. Its arguments: the directory of the package, the control socket, the connection to the holder
    (kept open), CRIU's pid, the session's cgroup."""
    control = socket.socket(fileno=int(sys.argv[2]))
    Guard(control, int(sys.argv[4]), sys.argv[5]).run()
