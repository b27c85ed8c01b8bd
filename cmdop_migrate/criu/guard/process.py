"""The process that watches one CRIU while it dumps a session, and puts the session right if CRIU is killed.

It traces CRIU. The kernel stops a traced process as it begins to exit, also after SIGKILL, and only later releases
what that process traces itself. In this stop the guard freezes the session's cgroup, so no process of it takes a step
with CRIU's code in it; then it lets CRIU go, and puts back what CRIU changed (putback.py).

It belongs neither to the command's cgroup nor to its process group, so nothing that ends these ends the guard or
CRIU. Killed itself, it leaves a CRIU that works on unwatched. It keeps the connection with which the session was
frozen: the holder thaws the session only when the guard is done.

On its control socket it is asked `snapshot` once, when the session is frozen and CRIU has not looked at it yet, and
answers with one JSON object; with another one it reports the end. Stdlib only: it starts beside every dump.
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

from cmdop_migrate.criu.guard import ptrace, put_back
from cmdop_migrate.holder import cgroup

FROZEN_WITHIN = 5.0
PATIENCE = 30.0  # seconds that CRIU may take to let go of the session once its command is gone


class Guard:
    def __init__(self, control: socket.socket, criu: int, group: str) -> None:
        self._control, self._criu, self._group = control, criu, group
        self._snapshot: put_back.Snapshot | None = None
        self._kill_at: float | None = None
        self._signals, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # it ends with CRIU
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("-1000")
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def run(self) -> None:
        if not self._asked():
            return
        try:
            ptrace.seize(self._criu, ptrace.O_TRACEEXIT)
            began = time.monotonic()
            self._snapshot = put_back.Snapshot.take(self._group)
        except (OSError, ptrace.Stuck) as error:
            self._tell({"guarded": False, "why": str(error)})
        else:
            self._tell(
                {
                    "guarded": True,
                    "blocked_trap": self._snapshot.blocked_trap(),
                    "took_s": round(time.monotonic() - began, 6),
                }
            )
        with contextlib.suppress(OSError):
            self._watch()

    def _asked(self) -> bool:
        """Wait for `snapshot`. False when CRIU or the command ends first."""
        death = os.pidfd_open(self._criu)
        try:
            ready = select.select([self._control.fileno(), death], [], [])[0]
            return self._control.fileno() in ready and self._control.recv(64) == b"snapshot"
        finally:
            os.close(death)

    def _watch(self) -> None:
        """Pass on CRIU's signals until it exits."""
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
            found, status = os.waitpid(self._criu, ptrace.WALL | os.WNOHANG)
            if found:
                return status
            command = [] if self._kill_at is not None else [self._control.fileno()]
            left = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            ready = select.select([self._signals, *command], [], [], left)[0]
            with contextlib.suppress(BlockingIOError):
                os.read(self._signals, 4096)
            if self._control.fileno() in ready and not self._control.recv(64):
                self._kill_at = time.monotonic() + PATIENCE  # the command is gone: CRIU notices, and ends by itself
            elif left == 0.0:
                os.kill(self._criu, signal.SIGKILL)
                self._kill_at = time.monotonic() + PATIENCE

    def _on_exit(self) -> None:
        """CRIU is about to exit, and still traces what it has not released."""
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
            self._tell({"damaged": len(damaged), "repaired": repaired, "why": why, "took_s": took})

    def _freeze(self) -> None:
        cgroup.order_freeze(self._group)
        until = time.monotonic() + FROZEN_WITHIN
        while not cgroup.is_frozen(self._group) and cgroup.is_populated(self._group) and time.monotonic() < until:
            time.sleep(ptrace.LOOK_EVERY)

    def _tell(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # the command is gone
            self._control.send(json.dumps(message).encode())


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Handle SIGCHLD: the wake-up descriptor is what counts."""


def main() -> None:
    """argv: the package's home, the control socket, the connection to the holder (kept open), CRIU's pid, the
    session's cgroup."""
    control = socket.socket(fileno=int(sys.argv[2]))
    Guard(control, int(sys.argv[4]), sys.argv[5]).run()
