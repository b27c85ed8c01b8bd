"""Ask the gate, an executable or an HTTP address, before a line is committed.

One question at a time, in a process of its own that gets JSON on its standard
input; the holder waits for nothing. Exit status 0: the line may be committed.
1: it may not, for the reason that the process printed. Any other status, and no
answer in time, is a failure: then `on_error` decides. Only a holder with a gate
imports this module.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

from cmdop_migrate.holder import cgroup, protocol, syscalls
from cmdop_migrate.util import trusted_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

KEPT = 4096  # bytes of what the process prints
SHOWN = 200  # characters of the reason
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE)  # signals that a holder ignores
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_CALL = "import sys; sys.path.insert(0, sys.argv[1]); from cmdop_migrate.holder.gate_http import main; main()"


class Gate:
    """Ask one question at a time. `answer` is called with (allowed, why, failed) once for each `ask` that is not
    cancelled, and never from within `ask`; `failed`: the gate gave no answer, and `on_error` decided."""

    def __init__(
        self, order: dict[str, object], group: str, epoll: select.epoll, answer: Callable[[bool, str, bool], None]
    ) -> None:
        self.address = str(order["address"])
        self._timeout, self._allow = protocol.Fields(order).seconds("timeout"), order["on_error"] == "allow"
        self._group, self._epoll, self._answer = cgroup.gate(group), epoll, answer
        self._pid, self._pipe = 0, -1
        self._said, self._problem = b"", ""
        self.deadline: float | None = None  # on CLOCK_MONOTONIC; None: no question is open

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 if there is nothing to read."""
        return self._pipe

    def ask(self, facts: dict[str, object]) -> None:
        """Ask a question; one that is still open is cancelled."""
        self.cancel()
        self._said, self._problem = b"", ""
        try:
            self._start(json.dumps(facts).encode() + b"\n")
            self.deadline = time.monotonic() + self._timeout
        except OSError as error:
            self._problem = self._problem or f"not run: {error.strerror}"
            self.deadline = time.monotonic()

    def _start(self, question: bytes) -> None:
        argv = [self.address]
        if self.address.startswith(("http://", "https://")):
            home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            argv = [sys.executable, "-I", "-S", "-c", _CALL, home, self.address, str(self._timeout)]
        elif problem := trusted_file.refusal(self.address):
            self._problem = f"not run: {problem}"
            raise OSError
        cgroup.create(self._group)
        self._pipe, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(self._pipe, False)
            self._epoll.register(self._pipe, select.EPOLLIN)
            self._pid = _spawn(argv, question, theirs)
        except OSError:
            self._hang_up()
            raise
        finally:
            os.close(theirs)
        try:
            cgroup.join(self._group, self._pid)
        except ProcessLookupError:
            return  # it has answered and ended already

    def on_output(self) -> None:
        """Read what the process printed; note when it has closed its output."""
        try:
            data = os.read(self._pipe, 64 << 10)
        except BlockingIOError:
            return
        self._said = (self._said + data)[:KEPT]
        if not data:
            self._hang_up()

    def on_exit(self, pid: int, status: int) -> None:
        """Take the answer if `pid` is the process that was asked."""
        if pid != self._pid:
            return
        while self._pipe >= 0:
            before = len(self._said)
            self.on_output()
            if len(self._said) == before:
                break
        code = os.waitstatus_to_exitcode(status)
        if code in (0, 1):
            self._finish(code == 0, "" if code == 0 else self._reason() or "refused by the gate")
        else:
            ended = f"killed by {syscalls.signal_name(-code)}" if code < 0 else f"exited {code}"
            self._fail(f"{ended}{': ' if self._said.strip() else ''}{self._reason()}")

    def check(self, now: float) -> None:
        """Fail a question that has taken too long."""
        if self.deadline is not None and now >= self.deadline:
            self._fail(self._problem or f"no answer after {self._timeout:g} s")

    def cancel(self) -> None:
        """Kill the process that was asked; its answer is no longer wanted."""
        self.deadline = None
        self._hang_up()
        if self._pid:
            self._pid = 0
            cgroup.kill(self._group)

    def _fail(self, problem: str) -> None:
        self._finish(self._allow, f"the gate failed: {problem}", failed=True)

    def _finish(self, allowed: bool, why: str, failed: bool = False) -> None:
        self.cancel()
        self._answer(allowed, why, failed)

    def _hang_up(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)  # no other process has it: that removes it from the epoll too
            self._pipe = -1

    def _reason(self) -> str:
        """Return the first line that it printed, made harmless for a terminal."""
        lines = self._said.decode("utf-8", "replace").strip().splitlines()
        return "".join(char for char in lines[0][:SHOWN] if char.isprintable()) if lines else ""


def _spawn(argv: list[str], question: bytes, output: int) -> int:
    given = os.memfd_create("question")  # not a pipe: writing to it never waits for a gate that does not read
    try:
        os.write(given, question)
        os.lseek(given, 0, os.SEEK_SET)
        return os.posix_spawn(
            os.path.realpath(argv[0])
            if len(argv) == 1
            else argv[0],  # the file that was checked, not what the link points to now
            argv,
            _ENVIRONMENT,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, given, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setsid=True,
            setsigdef=_IGNORED,
        )
    finally:
        os.close(given)
