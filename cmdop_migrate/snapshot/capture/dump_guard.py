"""Start the dump guard (criu/guard/process.py) beside a CRIU, and hear from it.

A dump without a guard is as good as one with it unless CRIU is killed: what keeps the guard from working is logged,
and the dump continues.
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
from cmdop_migrate.host.run import HOLDERS
from cmdop_migrate.session.holder_client import Channel

ANSWERS_WITHIN = 10.0
ENDS_WITHIN = 40.0  # seconds for putting back a session of thousands of threads
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from cmdop_migrate.criu.guard.process import main; main()"
_log = log.get("checkpoint")


class DumpGuard:
    """The guard of one CRIU. Use as a context manager: at the end of the block it has ended."""

    def __init__(self, group: str, channel: Channel) -> None:
        """`group`: the session's cgroup; `channel`: the connection to the holder with which it is frozen."""
        self._group, self._channel = group, channel
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._guards = False
        self._blocked_trap: frozenset[int] = frozenset()

    def __enter__(self) -> DumpGuard:
        return self

    def start(self, criu: int) -> None:
        """Start the guard. CRIU leaves the command's cgroup: with its code in a process it must not be killed. It gets
        the processor as soon as it wants it: the shorter a process waits for CRIU at the end of CRIU's code, the less
        likely a kill comes in that moment, in which the trap that ends this code is on its way."""
        holders = os.path.join(os.path.dirname(self._group), HOLDERS)
        _join(holders, criu)
        with contextlib.suppress(OSError):  # where the host does not allow it
            os.sched_setscheduler(criu, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        if not ptrace.is_possible():
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(ANSWERS_WITHIN)
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
        """Have the guard note the state of the session, which is frozen, before CRIU looks at it."""
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
        """Wait until the guard has ended: until then the session is not to be thawed."""
        if self._control is None or self._process is None:
            return
        if self._guards:
            report = self._hear(ENDS_WITHIN)
            if not report:
                self._stand_in()
            elif report["damaged"]:
                _log.warning("CRIU died with its code in the session: %s", report)
            else:
                _log.debug("dump guard: %s", report)
        self._control.close()
        try:
            self._process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            _log.warning("the dump guard does not end: killed")
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        """Kill a guard that does not release CRIU: it is stopped itself, for example."""
        if self._process is not None:
            _log.warning("the dump guard does not let CRIU end: killed")
            self._process.kill()

    def _stand_in(self) -> None:
        """Do what is left to do for a guard that was killed, after CRIU has ended."""
        _log.warning("the dump guard was killed")
        with contextlib.suppress(OSError, ptrace.Stuck):
            put_back.unblock_trap(self._group, self._blocked_trap)

    def _ask(self, request: bytes) -> dict[str, Any]:
        assert self._control is not None
        try:
            self._control.send(request)
        except OSError:
            return {}
        return self._hear(ANSWERS_WITHIN)

    def _hear(self, within: float) -> dict[str, Any]:
        assert self._control is not None
        try:
            if not select.select([self._control], [], [], within)[0]:
                return {}
            data = self._control.recv(1 << 20)
            answer: dict[str, Any] = json.loads(data) if data else {}
        except (OSError, ValueError):
            return {}
        return answer


def _join(group: str, pid: int) -> None:
    with contextlib.suppress(OSError):  # it has just been killed
        cgroup.join(group, pid)
