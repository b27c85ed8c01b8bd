"""Talks to `criu swrk`: one request, the notifications on the way, one answer.

`spawn` and `converse` are apart on purpose: with `rst_sibling` the restored
root becomes a child of whoever spawned the worker (the holder), while another
process may hold the other end of the socket and do the talking.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cmdop_migrate import log
from cmdop_migrate.criu.failures import diagnosis
from cmdop_migrate.criu.protobuf import Malformed
from cmdop_migrate.criu.rpc import ReqType, decode, encode
from cmdop_migrate.errors import TimedOut

_LOG = log.get("criu")
_MESSAGE = 1 << 16
_MAX_FDS = 16
_GRACE = 2.0  # seconds a worker gets to finish by itself
_CURE = 30.0  # and to give back the tasks it has in its hands
# CRIU gets SIGCHLD whenever a task that it traces stops, and only wants to hear that one died, which the task's socket
# tells as well. Unblocked, each one would stop CRIU until its own tracer, the dump guard, continues it.
_NOT_HEARD = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD}
_NEVER = "-1000"  # for the kernel, which looks for somebody to kill when it is out of memory
# CRIU only logs a `no` at these and lets the tasks run all the same.
_TOO_LATE_TO_REFUSE = ("pre-resume", "post-resume")


@dataclass(frozen=True)
class Notification:
    """CRIU has reached a point and waits for us. `pid` is the restored root's, where CRIU tells it. The descriptors
    belong to the conversation, which hands them over with its result or closes them."""

    script: str
    pid: int | None
    fds: tuple[int, ...]


@dataclass(frozen=True)
class Response:
    """How it ended. `phases`: seconds up to each notification since the one before (time in callbacks left out), and
    `finish` for the rest. `fds` (close-on-exec) are the caller's: with orphan_pts_master, the new PTY master."""

    success: bool
    pid: int = 0
    fds: tuple[int, ...] = ()
    errno: int = 0
    errmsg: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    refused_at: str | None = None


OnNotify = Callable[[Notification], bool | None]


class HungUp(Exception):
    """The worker went away without an answer, or with one nobody can read."""


def converse(
    sock: socket.socket,
    request: Mapping[str, Any],
    on_notify: OnNotify | None = None,
    timeout: float | None = None,
    worker: int | None = None,
) -> Response:
    """Send the request, answer each notification, return the answer; a `no` from CRIU is a result.

    `on_notify` may return False, or raise, to refuse: CRIU is told so and gives up, and what was raised is raised here
    after CRIU has answered. At `pre-resume` CRIU would go on regardless: there the restored root, and with it its pid
    namespace, is killed, and the conversation ends at once. Raises TimedOut when CRIU took `timeout` seconds, those in
    which it waited for `on_notify` not counted; HungUp when the worker is gone: with its pid, `worker`, also while a
    child that it left behind keeps its end of the socket open. After these and after a refusal at `pre-resume` the
    worker is the caller's to `end`.
    """
    talk = _Conversation(sock, on_notify, None if timeout is None else time.monotonic() + timeout, _watch(worker))
    try:
        response = talk.run(encode("req", request))
    except BaseException:
        talk.close_fds()
        raise
    finally:
        if talk.death is not None:
            os.close(talk.death)
    if talk.raised is not None or not response.success:
        talk.close_fds()
    if talk.raised is not None:
        raise talk.raised
    return response


class _Conversation:
    def __init__(
        self, sock: socket.socket, on_notify: OnNotify | None, deadline: float | None, death: int | None
    ) -> None:
        self.sock, self.on_notify, self.deadline = sock, on_notify, deadline
        self.death = death  # can be read once the worker is dead
        self.fds: list[int] = []
        self.phases: dict[str, float] = {}
        self.root: int | None = None
        self.refused_at: str | None = None
        self.raised: BaseException | None = None

    def run(self, request: bytes) -> Response:
        since = time.monotonic()
        self._send(request)
        while True:
            answer, fds = self._receive()
            now = time.monotonic()
            if answer["type"] != ReqType.NOTIFY:
                self.phases["finish"] = now - since
                return self._response(answer)
            notify = answer.get("notify", {})
            script = notify.get("script", "")
            self.phases[script] = self.phases.get(script, 0.0) + now - since
            self.root = notify.get("pid", self.root)
            yes = self._ask(Notification(script, notify.get("pid"), fds))
            since = time.monotonic()
            if self.deadline is not None:
                self.deadline += since - now
            if not yes and script in _TOO_LATE_TO_REFUSE:
                self._kill_root()
                return self._response({})
            self._send(encode("req", {"type": ReqType.NOTIFY, "notify_success": yes}))

    def _ask(self, notification: Notification) -> bool:
        if self.refused_at is not None:
            return False
        try:
            yes = self.on_notify is None or self.on_notify(notification) is not False
        except BaseException as error:  # noqa: BLE001 - CRIU is told first, then it is raised by converse
            self.raised, yes = error, False
        if not yes:
            self.refused_at = notification.script
        return yes

    def _kill_root(self) -> None:
        if self.root:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.root, signal.SIGKILL)

    def _response(self, answer: Mapping[str, Any]) -> Response:
        success = bool(answer.get("success")) and self.refused_at is None
        return Response(
            success=success,
            pid=answer.get("restore", {}).get("pid", 0),
            fds=tuple(self.fds) if success else (),
            errno=answer.get("cr_errno", 0),
            errmsg=answer.get("cr_errmsg", "").strip(),
            phases=self.phases,
            refused_at=self.refused_at,
        )

    def _send(self, data: bytes) -> None:
        try:
            self.sock.send(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise HungUp from error

    def _wait(self) -> None:
        """Until there is something to receive, or the worker is dead."""
        left = None if self.deadline is None else self.deadline - time.monotonic()
        self.sock.setblocking(False)
        fds = [self.sock.fileno()] if self.death is None else [self.sock.fileno(), self.death]
        if (left is not None and left <= 0) or not select.select(fds, [], [], left)[0]:
            raise TimedOut("CRIU did not finish in the time given", "Give it more, or see its log.")

    def _receive(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        self._wait()
        try:
            data, control, flags, _ = self.sock.recvmsg(
                _MESSAGE, socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except (ConnectionResetError, BlockingIOError) as error:
            raise HungUp from error
        fds = array.array("i")
        for level, kind, raw in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
        self.fds += fds
        if not data or flags & socket.MSG_TRUNC:
            raise HungUp
        try:
            return decode("resp", data), tuple(fds)
        except Malformed as error:
            raise HungUp from error

    def close_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def _watch(worker: int | None) -> int | None:
    return None if worker is None else os.pidfd_open(worker)


def spawn(criu: Sequence[str], theirs: socket.socket, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start the worker on its end of a SOCK_SEQPACKET pair; `criu` is the command up to CRIU's own arguments. The
    caller closes `theirs` afterwards.

    Whoever wants to end it is to ask us: at the wrong moment, with CRIU's first instructions in a process, its death is
    that process's. So it does not hear what a terminal or a service manager sends to all of us, nor does the kernel
    choose it when memory runs out."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_HEARD)
    try:
        worker = subprocess.Popen(
            [*criu, "swrk", str(theirs.fileno())],
            pass_fds=(theirs.fileno(), *pass_fds),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with contextlib.suppress(OSError):  # not ours to lower, in a container
        Path(f"/proc/{worker.pid}/oom_score_adj").write_text(_NEVER, encoding="ascii")
    return worker


def end(process: subprocess.Popen[bytes], patience: float = _GRACE, on_stuck: Callable[[], None] | None = None) -> None:
    """Make sure it is gone: `patience` seconds to finish by itself, SIGKILL. `on_stuck` is called when it is still
    there some time after that: a process that traces it keeps it. What it had forked to try out the kernel goes with
    it: one that is killed leaves such a child stopped for ever."""
    if process.returncode is not None:
        return
    death = os.pidfd_open(process.pid)
    try:
        if not select.select([death], [], [], patience)[0]:
            process.kill()
            if not select.select([death], [], [], _CURE)[0] and on_stuck is not None:
                on_stuck()
            select.select([death], [], [])
    finally:
        os.close(death)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the number is still its own
    process.wait()


def run(
    criu: Sequence[str],
    request: Mapping[str, Any],
    log_path: Path,
    *,
    what: str,
    pass_fds: Sequence[int] = (),
    on_notify: OnNotify | None = None,
    on_cancel: Callable[[], None] | None = None,
    on_spawn: Callable[[int], None] | None = None,
    on_stuck: Callable[[], None] | None = None,
    timeout: float | None = None,
) -> Response:
    """One worker from start to end, in this process. Raises CriuFailed (with cause, fix and the tail of the log at
    `log_path`) unless CRIU succeeded, TimedOut, or what `on_notify` raised. However it ends, the worker is gone.

    `on_cancel` runs first when the conversation is cut short (time-out, Ctrl-C): closing the page-server socket there
    lets CRIU fail by itself and let go of the tasks. It is given time for that: killed, it may take one with it.
    `on_spawn` gets the worker's pid before the request is sent; `on_stuck` as in `end`.
    Always give a `timeout`: CRIU waits for ever on some damaged images.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            worker = spawn(criu, theirs, pass_fds)
        try:
            if on_spawn is not None:
                on_spawn(worker.pid)
            response = converse(ours, request, on_notify, timeout, worker.pid)
        except HungUp:
            end(worker, on_stuck=on_stuck)
            raise diagnosis.failure(f"{what}: CRIU died ({_how(worker.returncode)})", log_path) from None
        except BaseException:
            ours.close()
            if on_cancel is not None:
                on_cancel()
            end(worker, 0 if on_cancel is None else _CURE, on_stuck)
            raise
        end(worker, 0 if response.refused_at in _TOO_LATE_TO_REFUSE else _GRACE, on_stuck)
    _LOG.debug("CRIU answered: success=%s phases=%s", response.success, response.phases)
    if not response.success:
        raise diagnosis.failure(what, log_path, response.errmsg)
    return response


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        return signal.Signals(-status).name
    return f"exit status {status}"
