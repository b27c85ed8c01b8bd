"""Run a command in a fork of the fork server, as its client.

Python with all modules of this package takes longer to start than most commands take to run. The agent keeps a process
that has loaded them (server.py); a fork of it (child.py) does the work, with this process's arguments, environment,
descriptors and process attributes. This process forwards signals, and exits as the fork exited.

Nothing is done twice: the fork begins when it receives `go`, and after sending that the client never does the work
itself. Before `go`, any failure or difference means that the client does the work in its own process, as if there were
no fork server.

Only modules that the interpreter has loaded anyway, and modules in C, are imported here: each other one costs a good
part of what is saved.
"""

from __future__ import annotations

import _socket
import os
import select
import stat
import sys
import time

from cmdop_migrate.cli.forkserver import compat

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import NoReturn
else:
    import _signal as signal  # without its enums, which take as long to create as everything else here

COMMANDS = frozenset(
    ("checkpoint", "restore", "fork", "checkpoints", "ls", "show", "plan", "output", "send"),
)
ANSWER_TIMEOUT = 0.3  # seconds for the fork server to answer: about what it saves
STATUS_TIMEOUT = 2.0  # seconds for it to report how the fork ended, if the fork could not
RUN_DIR, CONFIG = (
    "/run/cmdop-migrate",
    "/etc/cmdop-migrate/config.toml",
)  # as in config.py, which takes too long to load
_WITH_VALUE = ("--config", "--state-dir", "--run-dir", "--host", "--store")
_DESCRIPTORS = "/fd/"
_WITHOUT = ("--json", "-v", "-vv", "--verbose")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_STREAMS = ("stdin", "stdout", "stderr")


def run_in_fork() -> None:
    """Run the command of sys.argv in a fork of the fork server, and exit as that fork exits.

    Return if the command must run in this process: it is not one of COMMANDS, the user is not root, or no fork server
    accepted it. Nothing has been done then.
    """
    run_dir = run_dir_of(sys.argv[1:], os.environ) if os.geteuid() == 0 else None
    forked = ForkedCommand.request(run_dir) if run_dir is not None else None
    if forked is not None:
        forked.run()


def run_dir_of(words: list[str], environ: os._Environ[str] | dict[str, str]) -> str | None:
    """Return the run_dir whose fork server may run this command, or None if it must run in this process.

    The fork reads its settings itself, from the same arguments: a wrong guess here costs time and nothing else.
    """
    flags: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, given, value = word.partition("=")
        if name in _WITH_VALUE:
            flags[name] = value if given else next(rest, "")
        elif word not in _WITHOUT:
            break
    else:
        return None
    if word not in COMMANDS or "--help" in words or "-h" in words:
        return None
    if compat.is_off(environ.get(compat.SWITCH)) or any(key.startswith(compat.TEST_PREFIX) for key in environ):
        return None
    settings = [value for key, value in environ.items() if key.startswith("CMDOP_MIGRATE_")]
    if any(_DESCRIPTORS in text for text in (*words, *settings)):  # as in <(…): a fork gets only the three streams
        return None
    run_dir = flags.get("--run-dir") or environ.get("CMDOP_MIGRATE_RUN_DIR")
    if not run_dir:
        run_dir = _from_file(flags.get("--config") or environ.get("CMDOP_MIGRATE_CONFIG") or CONFIG)
    return run_dir if run_dir.startswith("/") else None


def _from_file(path: str) -> str:
    """Return run_dir of a config file, or the default. The process that does the work reports errors in the file. A
    file that can be read only once, such as a pipe, is left to it: return an empty string."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return RUN_DIR if path == os.devnull else ""
        with open(path, encoding="utf-8") as file:
            text = file.read().lstrip("\ufeff")
    except (OSError, UnicodeDecodeError):
        return RUN_DIR
    if "run_dir" not in text:  # nearly always; loading a TOML parser takes as long as the rest of this
        return RUN_DIR
    import tomllib

    try:
        value = tomllib.loads(text).get("run_dir")
    except tomllib.TOMLDecodeError:
        return RUN_DIR
    return value if isinstance(value, str) else RUN_DIR


class ForkedCommand:
    """Represent a fork that is ready to run this process's command."""

    def __init__(self, connection: _socket.socket, worker: int) -> None:
        self._connection, self._worker = connection, worker

    @classmethod
    def request(cls, run_dir: str) -> ForkedCommand | None:
        """Ask the fork server for a fork. Return None if there is no server, or it refuses."""
        if _is_background_job():
            return None  # reading from the terminal must stop this process; a fork in another session is not stopped
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        try:
            worker = _agree(connection, run_dir, _request())
            if worker is not None:
                return cls(connection, worker)
        except OSError:
            pass  # no such socket, no server behind it, no answer in time
        connection.close()
        return None

    def run(self) -> NoReturn:
        """Send `go`, forward signals, and exit as the fork exits. From here on only the fork does the work."""
        woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (*_FORWARDED, signal.SIGTSTP, signal.SIGCONT):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _ignore)
        poll = select.poll()
        poll.register(self._worker, select.POLLIN)
        poll.register(woken, select.POLLIN)
        theirs, _alive = os.pipe2(os.O_CLOEXEC)  # closes when this process ends: the kernel then kills the fork
        self._go([theirs, *_open_streams()])
        os.close(theirs)
        while True:
            for fd, _ in poll.poll():
                if fd == self._worker:
                    self._end()
                for received in os.read(woken, 64):
                    self._forward(received)

    def _go(self, fds: list[int]) -> None:
        rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
        try:
            self._connection.settimeout(None)
            self._connection.sendmsg([b"go\n"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        except OSError:
            pass  # the fork is gone: its descriptor becomes readable

    def _forward(self, number: int) -> None:
        try:
            if number != signal.SIGTSTP:
                signal.pidfd_send_signal(self._worker, number)
                return
            signal.pidfd_send_signal(self._worker, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            signal.pidfd_send_signal(self._worker, signal.SIGCONT)  # this process was continued
        except ProcessLookupError:
            return  # the fork has ended

    def _end(self) -> NoReturn:
        """Exit as the fork did, by its status or by the same signal."""
        reply = b""
        self._connection.settimeout(STATUS_TIMEOUT)
        try:
            while b"\n" not in reply and (part := self._connection.recv(64)):
                reply += part
        except OSError:
            pass
        word, _, value = reply.partition(b"\n")[0].partition(b" ")
        if word != b"status" or not value.isdigit():
            os._exit(_report_lost("--json" in sys.argv))
        status = int(value)
        if os.WIFSIGNALED(status):
            _die_by_signal(os.WTERMSIG(status))
        os._exit(os.waitstatus_to_exitcode(status))


def _ignore(*_: object) -> None:
    """Do nothing: the signal's number is read from the wake-up descriptor."""


def _is_background_job() -> bool:
    """Return True if this process is a background job of its terminal."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return False


def _open_streams() -> list[int]:
    return [number for number, name in enumerate(_STREAMS) if getattr(sys, name) is not None]


def _request() -> bytes:
    """Return the request: its length, then compatibility facts, streams, arguments and environment, separated by
    NUL."""
    fields = [compat.of_this_process()]
    for name in _STREAMS:
        stream = getattr(sys, name)
        if stream is None:
            fields.append(b"")
        else:
            fields.append(
                f"{stream.encoding} {stream.errors} {stream.line_buffering:d} {stream.write_through:d}".encode()
            )
    fields.append(str(len(sys.argv)).encode())
    fields += map(os.fsencode, sys.argv)
    fields += [key + b"=" + value for key, value in os.environb.items()]
    body = b"\0".join(fields)
    return str(len(body)).encode() + b"\n" + body


def _agree(connection: _socket.socket, run_dir: str, request: bytes) -> int | None:
    """Send the request, and return the pidfd of the fork that waits for `go`. Return None if the server refuses; raise
    OSError if it does not answer in time."""
    until = time.monotonic() + ANSWER_TIMEOUT
    connection.settimeout(ANSWER_TIMEOUT)
    directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{compat.SOCKET}")  # the path of a socket is limited to 108 bytes
    finally:
        os.close(directory)
    peer = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    if peer[4:8] != bytes(4):
        return None  # not a process of root: it must not see our environment
    sent = 0
    while sent < len(request):
        connection.settimeout(max(0.001, until - time.monotonic()))
        sent += connection.send(request[sent:])
    connection.settimeout(max(0.001, until - time.monotonic()))
    answer, passed, _, _ = connection.recvmsg(256, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
    worker = next((int.from_bytes(data[:4], sys.byteorder) for _, _, data in passed), None)
    if answer == b"ready\n":
        return worker
    if worker is not None:
        os.close(worker)
    return None


def _die_by_signal(number: int) -> NoReturn:
    """End by the signal that ended the fork, without a second core dump."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _report_lost(as_json: bool) -> int:
    """Print that the fork began its work and was lost, and return the exit status."""
    from cmdop_migrate.cli import render
    from cmdop_migrate.errors import Unexpected

    error = Unexpected("the process that did the work was killed", "See: cmdop-migrate ls, and the log.")
    render.failure(error, as_json)
    return error.exit
