"""The command line: handed to the ready process where there is one, done here where not.

Python with all our modules takes longer to start than most commands take. The
agent keeps a process that has loaded them (cli/forkserver/server.py); a fork of it does the
work, with this process's words, environment, descriptors and surroundings. This
one passes signals on, and ends as the fork ended.

Nothing is done twice: the fork begins when it hears `go`, and who has said that
does not do the work itself any more, whatever happens. Before it, whatever is
not as it should be means that the work is done here, as if there were no other.

Only what the interpreter has loaded anyway, and modules in C: each other one
costs a good part of what is saved.
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
    import _signal as signal  # without the enums around it, which take as long to make as all the rest

COMMANDS = frozenset(
    ("checkpoint", "restore", "fork", "checkpoints", "ls", "show", "plan", "output", "send"),
)
PATIENCE = 0.3  # so long the ready process has to answer: about what it saves
LAST_WORD = 2.0  # … and so long to say how the fork ended, if that could not
RUN_DIR, CONFIG = "/run/cmdop-migrate", "/etc/cmdop-migrate/config.toml"  # as in config.py, which is too much to load
_WITH_VALUE = ("--config", "--state-dir", "--run-dir", "--host", "--store")
_DESCRIPTORS = "/fd/"
_WITHOUT = ("--json", "-v", "-vv", "--verbose")
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_STREAMS = ("stdin", "stdout", "stderr")


def main() -> None:
    try:
        run_dir = run_dir_of(sys.argv[1:], os.environ) if os.geteuid() == 0 else None
        handed = Handed.over(run_dir) if run_dir is not None else None
        if handed is not None:
            handed.attend()
    except KeyboardInterrupt:  # before the work was begun: once it is, it decides what Ctrl-C means
        os._exit(compat.INTERRUPTED)
    from cmdop_migrate.cli.main import main as here

    try:
        here()
    except SystemExit as end:
        if end.code == compat.INTERRUPTED:  # then nobody waits for threads, which may wait for somebody far away
            os._exit(compat.INTERRUPTED)
        raise


def run_dir_of(words: list[str], environ: os._Environ[str] | dict[str, str]) -> str | None:
    """Where the ready process for this command would be; None: it is one that is done here. What the fork does with
    which settings it finds out itself, from the same words: a wrong guess costs time and nothing else."""
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
    if any(_DESCRIPTORS in one for one in (*words, *settings)):  # ours, as <(…): a fork has the streams alone
        return None
    found = flags.get("--run-dir") or environ.get("CMDOP_MIGRATE_RUN_DIR")
    if not found:
        found = _from_file(flags.get("--config") or environ.get("CMDOP_MIGRATE_CONFIG") or CONFIG)
    return found if found.startswith("/") else None


def _from_file(path: str) -> str:
    """What is wrong with the file is said by who does the work; who also is the one to read what can be read once."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return RUN_DIR if path == os.devnull else ""
        with open(path, encoding="utf-8") as file:
            text = file.read().lstrip("\ufeff")
    except (OSError, UnicodeDecodeError):
        return RUN_DIR
    if "run_dir" not in text:  # nearly always; a parser takes as long to load as the rest of this
        return RUN_DIR
    import tomllib

    try:
        value = tomllib.loads(text).get("run_dir")
    except tomllib.TOMLDecodeError:
        return RUN_DIR
    return value if isinstance(value, str) else RUN_DIR


class Handed:
    """A command that a fork is ready to do."""

    def __init__(self, connection: _socket.socket, worker: int) -> None:
        self._connection, self._worker = connection, worker

    @classmethod
    def over(cls, run_dir: str) -> Handed | None:
        """None: there is nobody ready, or not for this."""
        if _in_background():
            return None  # to read from the terminal must stop us, which it does not a process of another session
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        try:
            worker = _agree(connection, run_dir, _request())
            if worker is not None:
                return cls(connection, worker)
        except OSError:
            pass  # no such socket, nobody at it, no answer in time: as if there were none
        connection.close()
        return None

    def attend(self) -> NoReturn:
        """From here on it is the worker's, and nobody else's. Ends as it ends."""
        heard, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (*_PASSED_ON, signal.SIGTSTP, signal.SIGCONT):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _noted)
        poll = select.poll()
        poll.register(self._worker, select.POLLIN)
        poll.register(heard, select.POLLIN)
        theirs, _alive = os.pipe2(os.O_CLOEXEC)  # it ends with this process: the kernel then kills the worker
        self._go([theirs, *_given()])
        os.close(theirs)
        while True:
            for fd, _ in poll.poll():
                if fd == self._worker:
                    self._end()
                for came in os.read(heard, 64):
                    self._pass_on(came)

    def _go(self, fds: list[int]) -> None:
        rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
        try:
            self._connection.settimeout(None)
            self._connection.sendmsg([b"go\n"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        except OSError:
            pass  # it is gone, which is seen at once

    def _pass_on(self, number: int) -> None:
        try:
            if number != signal.SIGTSTP:
                signal.pidfd_send_signal(self._worker, number)
                return
            signal.pidfd_send_signal(self._worker, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            signal.pidfd_send_signal(self._worker, signal.SIGCONT)  # here we go on
        except ProcessLookupError:
            return  # it has ended meanwhile

    def _end(self) -> NoReturn:
        said = b""
        self._connection.settimeout(LAST_WORD)
        try:
            while b"\n" not in said and (part := self._connection.recv(64)):
                said += part
        except OSError:
            pass
        word, _, value = said.partition(b"\n")[0].partition(b" ")
        if word != b"status" or not value.isdigit():
            os._exit(_lost("--json" in sys.argv))
        status = int(value)
        if os.WIFSIGNALED(status):
            _die_of(os.WTERMSIG(status))
        os._exit(os.waitstatus_to_exitcode(status))


def _noted(*_: object) -> None:
    """What is to be done is read from the descriptor that the signal has woken."""


def _in_background() -> bool:
    """Of a terminal's jobs, not the one that may read."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return False


def _given() -> list[int]:
    return [number for number, name in enumerate(_STREAMS) if getattr(sys, name) is not None]


def _request() -> bytes:
    """Likeness, streams, words, environment: fields with a NUL between them, after their length."""
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
    """The descriptor of a process that waits for our word; None when it will not do."""
    until = time.monotonic() + PATIENCE
    connection.settimeout(PATIENCE)
    directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{compat.SOCKET}")  # however long its path is
    finally:
        os.close(directory)
    peer = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    if peer[4:8] != bytes(4):
        return None  # not root's: it is not told what we were told
    sent = 0
    while sent < len(request):
        connection.settimeout(max(0.001, until - time.monotonic()))
        sent += connection.send(request[sent:])
    connection.settimeout(max(0.001, until - time.monotonic()))
    said, passed, _, _ = connection.recvmsg(256, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
    worker = next((int.from_bytes(data[:4], sys.byteorder) for _, _, data in passed), None)
    if said == b"ready\n":
        return worker
    if worker is not None:
        os.close(worker)
    return None


def _die_of(number: int) -> NoReturn:
    """As the worker did; without a second dump of memory that has nothing of interest in it."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _lost(as_json: bool) -> int:
    """It was begun, and nobody knows how far it came."""
    from cmdop_migrate.cli import render
    from cmdop_migrate.errors import Unexpected

    error = Unexpected("the process that did the work was killed", "See: cmdop-migrate ls, and the log.")
    render.failure(error, as_json)
    return error.exit
