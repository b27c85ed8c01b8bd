"""Start the dump guard (criu/guard/process.py) beside a CRIU, and read its reports.

A dump without a guard differs from one with it only if CRIU is killed: a failure of the guard is logged, and the dump
continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import cmdop_migrate
from cmdop_migrate import log
from cmdop_migrate.criu import ptrace
from cmdop_migrate.criu.guard import put_back
from cmdop_migrate.criu.image import signal_masks
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host.holder_order import HOLDERS
from cmdop_migrate.session.holder_client import Channel

ANSWER_TIMEOUT = 10.0
END_TIMEOUT = 40.0  # seconds for restoring the state of a session with thousands of threads
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from cmdop_migrate.criu.guard.process import main; main()"
_log = log.get("checkpoint")


class DumpGuard:
    """Run the guard of one CRIU. Use as a context manager: at the end of the block the guard has ended."""

    def __init__(self, group: str, channel: Channel) -> None:
        """Take the session's cgroup `group`, and `channel`, the connection to the holder with which it is frozen."""
        self._group, self._channel = group, channel
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._guards = False
        self._blocked_trap: frozenset[int] = frozenset()

    def __enter__(self) -> DumpGuard:
        return self

    def start(self, criu: int) -> None:
        """Start the guard. CRIU leaves the command's cgroup: while its code is injected into a process, CRIU must not
        be killed. CRIU gets real-time priority: the shorter a process waits for CRIU at the end of the injected code,
        the less likely a kill comes while the trap that ends this code is pending."""
        holders = os.path.join(os.path.dirname(self._group), HOLDERS)
        _join(holders, criu)
        with contextlib.suppress(OSError):  # where the host does not allow it
            os.sched_setscheduler(criu, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        if not ptrace.is_possible():
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(ANSWER_TIMEOUT)
        fds = (theirs.fileno(), self._channel.fileno())
        words = [str(Path(cmdop_migrate.__file__).parent.parent), *map(str, fds), str(criu), self._group]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
                cwd="/",
            )
        _join(holders, self._process.pid)
        self._control = ours

    def snapshot(self) -> None:
        """Have the guard record the state of the frozen session before CRIU looks at it."""
        if self._control is None:
            return
        answer = self._ask(b"snapshot")
        self._guards = bool(answer.get("guarded"))
        self._blocked_trap = frozenset(answer.get("blocked_trap", ()))
        _log.debug("dump guard: snapshot took %s s", answer.get("took_s"))
        if not self._guards:
            _log.warning("the dump is not guarded against a killed CRIU: %s", answer.get("why", "no answer"))

    def mend_images(self, images: Path) -> None:
        """Take the guard's own change out of CRIU's images: it blocks SIGTRAP while CRIU reads the session."""
        if self._guards:
            signal_masks.unblock_trap(images, self._blocked_trap)

    def __exit__(self, *_: object) -> None:
        """Wait until the guard has ended: until then the session must not be thawed."""
        if self._control is None or self._process is None:
            return
        if self._guards:
            report = self._receive(END_TIMEOUT)
            if not report:
                self._unblock_trap()
            elif report["damaged"]:
                _log.warning("CRIU died with its code in the session: %s", report)
            else:
                _log.debug("dump guard: %s", report)
        self._control.close()
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            _log.warning("the dump guard does not end: it is killed")
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        """Kill a guard that does not release CRIU, for example because the guard itself is stopped."""
        if self._process is not None:
            _log.warning("the dump guard does not let CRIU end: it is killed")
            self._process.kill()

    def _unblock_trap(self) -> None:
        """Unblock SIGTRAP in the session in place of a guard that was killed, after CRIU has ended."""
        _log.warning("the dump guard was killed")
        with contextlib.suppress(OSError, ptrace.Stuck):
            put_back.unblock_trap(self._group, self._blocked_trap)

    def _ask(self, request: bytes) -> dict[str, Any]:
        assert self._control is not None
        try:
            self._control.send(request)
        except OSError:
            return {}
        return self._receive(ANSWER_TIMEOUT)

    def _receive(self, timeout: float) -> dict[str, Any]:
        assert self._control is not None
        try:
            if not select.select([self._control], [], [], timeout)[0]:
                return {}
            data = self._control.recv(1 << 20)
            answer: dict[str, Any] = json.loads(data) if data else {}
        except (OSError, ValueError):
            return {}
        return answer


def _join(group: str, pid: int) -> None:
    with contextlib.suppress(OSError):  # it has just been killed
        cgroup.join(group, pid)
