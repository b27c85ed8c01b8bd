"""Run `criu swrk` and exchange messages with it: one request, its notifications, one answer.

`spawn` and `converse` are separate on purpose: with `rst_sibling` the restored root becomes a child of the process that
spawned the worker (the holder), while another process may hold the other end of the socket and exchange the messages.
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
_FINISH_WITHIN = 2.0  # seconds that a worker gets to end by itself
_RELEASE_WITHIN = 30.0  # seconds that a worker gets to release the tasks it has seized
# CRIU gets SIGCHLD whenever a task that it traces stops, and needs it only to learn that a task died, which the task's
# socket tells as well. Unblocked, each SIGCHLD would stop CRIU until its own tracer, the dump guard, continues it.
_BLOCKED = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD}
_NEVER_KILL = "-1000"  # oom_score_adj: the kernel does not choose it when memory runs out
# At these CRIU only logs a refusal and lets the tasks run nevertheless.
_TOO_LATE_TO_REFUSE = ("pre-resume", "post-resume")


@dataclass(frozen=True)
class Notification:
    """Describe a point that CRIU has reached, at which it waits for an answer. `pid` is the restored root's, where CRIU
    reports it. The descriptors belong to the conversation, which returns them with its result or closes them."""

    script: str
    pid: int | None
    fds: tuple[int, ...]


@dataclass(frozen=True)
class Response:
    """Describe the result of a request. `phases`: seconds up to each notification since the one before (without the
    time in callbacks), and `finish` for the rest. `fds` (close-on-exec) belong to the caller: with orphan_pts_master,
    the new PTY master."""

    success: bool
    pid: int = 0
    fds: tuple[int, ...] = ()
    errno: int = 0
    errmsg: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    refused_at: str | None = None


OnNotify = Callable[[Notification], bool | None]


class HungUp(Exception):
    """Signal that the worker ended without an answer, or with one that cannot be decoded."""


def converse(
    sock: socket.socket,
    request: Mapping[str, Any],
    on_notify: OnNotify | None = None,
    timeout: float | None = None,
    worker: int | None = None,
) -> Response:
    """Send the request, answer each notification, and return the answer; a failure reported by CRIU is a result.

    `on_notify` may return False, or raise, to refuse: CRIU gets the refusal and stops, and the exception is raised here
    after CRIU has answered. At `pre-resume` CRIU would continue regardless: there the restored root, and with it its
    pid namespace, is killed, and the conversation ends immediately. Raise TimedOut when CRIU took `timeout` seconds,
    not counting those in which it waited for `on_notify`. Raise HungUp when the worker has ended: with its pid,
    `worker`, also while a child that it left behind keeps its end of the socket open. After these errors and after a
    refusal at `pre-resume` the caller must `end` the worker."""
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
        self.death = death  # a pidfd: readable once the worker is dead
        self.fds: list[int] = []
        self.phases: dict[str, float] = {}
        self.root: int | None = None
        self.refused_at: str | None = None
        self.raised: BaseException | None = None

    def run(self, request: bytes) -> Response:
        """Send the request and answer notifications until CRIU answers."""
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
            accepted = self._ask(Notification(script, notify.get("pid"), fds))
            since = time.monotonic()
            if self.deadline is not None:
                self.deadline += since - now
            if not accepted and script in _TOO_LATE_TO_REFUSE:
                self._kill_root()
                return self._response({})
            self._send(encode("req", {"type": ReqType.NOTIFY, "notify_success": accepted}))

    def _ask(self, notification: Notification) -> bool:
        if self.refused_at is not None:
            return False
        try:
            accepted = self.on_notify is None or self.on_notify(notification) is not False
        except BaseException as error:  # noqa: BLE001 - CRIU gets its answer first, then converse raises it
            self.raised, accepted = error, False
        if not accepted:
            self.refused_at = notification.script
        return accepted

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
        """Wait until a message has arrived, or the worker is dead. Raise TimedOut."""
        left = None if self.deadline is None else self.deadline - time.monotonic()
        self.sock.setblocking(False)
        fds = [self.sock.fileno()] if self.death is None else [self.sock.fileno(), self.death]
        if (left is not None and left <= 0) or not select.select(fds, [], [], left)[0]:
            raise TimedOut("CRIU did not finish in the time given", "Allow more time, or see CRIU's log.")

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
        """Close all received descriptors."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def _watch(worker: int | None) -> int | None:
    return None if worker is None else os.pidfd_open(worker)


def spawn(criu: Sequence[str], theirs: socket.socket, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start the worker on its end of a SOCK_SEQPACKET pair; `criu` is the command up to CRIU's own arguments. The
    caller closes `theirs` afterwards.

    Only `end` may kill the worker: if CRIU dies at the wrong moment, with its first instructions in a process, that
    process dies too. So the signals that a terminal or a service manager sends to all our processes are blocked in the
    worker, and the kernel does not choose it when memory runs out."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
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
    with contextlib.suppress(OSError):  # a container may not lower it
        Path(f"/proc/{worker.pid}/oom_score_adj").write_text(_NEVER_KILL, encoding="ascii")
    return worker


def end(
    process: subprocess.Popen[bytes], patience: float = _FINISH_WITHIN, on_stuck: Callable[[], None] | None = None
) -> None:
    """End the worker: wait `patience` seconds for it to end by itself, then kill it. Call `on_stuck` if it still exists
    some time after that, because a process that traces it keeps it. The children that the worker had forked to probe
    the kernel are killed with it: otherwise a killed worker leaves such a child stopped forever."""
    if process.returncode is not None:
        return
    death = os.pidfd_open(process.pid)
    try:
        if not select.select([death], [], [], patience)[0]:
            process.kill()
            if not select.select([death], [], [], _RELEASE_WITHIN)[0] and on_stuck is not None:
                on_stuck()
            select.select([death], [], [])
    finally:
        os.close(death)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the worker is not reaped yet, so the number is still its own
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
    """Run one worker from start to end, in this process. Raise CriuFailed (with cause, fix and the tail of the log at
    `log_path`) if CRIU fails, TimedOut, or the exception of `on_notify`. In every case the worker has ended.

    `on_cancel` is called first when the conversation is interrupted (time-out, Ctrl-C): closing the page-server socket
    there makes CRIU fail by itself and release the tasks. CRIU gets time for that: if it is killed, a task may die with
    it. `on_spawn` gets the worker's pid before the request is sent; `on_stuck` as in `end`.
    Always pass a `timeout`: CRIU waits forever on some damaged images.
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
            raise diagnosis.failure(f"{what}: CRIU died ({_exit_text(worker.returncode)})", log_path) from None
        except BaseException:
            ours.close()
            if on_cancel is not None:
                on_cancel()
            end(worker, 0 if on_cancel is None else _RELEASE_WITHIN, on_stuck)
            raise
        end(worker, 0 if response.refused_at in _TOO_LATE_TO_REFUSE else _FINISH_WITHIN, on_stuck)
    _LOG.debug("CRIU answered: success=%s phases=%s", response.success, response.phases)
    if not response.success:
        raise diagnosis.failure(what, log_path, response.errmsg)
    return response


def _exit_text(status: int | None) -> str:
    if status is not None and status < 0:
        return signal.Signals(-status).name
    return f"exit status {status}"
