"""Run a client's command in a fork of the fork server.

The fork takes over the process attributes of the client that can be taken over, and compares the rest. If any of them
stays different, it refuses and ends, and the client does the work in its own process.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import io
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import NoReturn

from cmdop_migrate.cli.forkserver import inherit
from cmdop_migrate.cli.forkserver.compat import INTERRUPTED
from cmdop_migrate.cli.forkserver.inherit import Differs

MAX_FDS = 4  # the pipe that closes with the client, and its three streams
_STREAMS = ("stdin", "stdout", "stderr")


@dataclass(frozen=True)
class Stream:
    """Describe a standard stream as the client's interpreter opened it."""

    encoding: str
    errors: str
    line_buffering: bool
    write_through: bool


@dataclass(frozen=True)
class Request:
    """Hold what a client sends: compatibility facts, streams, arguments and environment."""

    facts: bytes
    streams: tuple[Stream | None, ...]
    argv: tuple[bytes, ...]
    environ: tuple[tuple[bytes, bytes], ...]

    @classmethod
    def parse(cls, body: bytes) -> Request:
        """Parse the body of a request. Raise ValueError or LookupError if it is malformed."""
        facts, *rest = body.split(b"\0")
        streams, count, words = rest[: len(_STREAMS)], int(rest[3]), rest[4:]
        if not 1 <= count <= len(words):
            raise ValueError("no command")
        environ = []
        for item in words[count:]:
            key, sign, value = item.partition(b"=")
            if not key or not sign:
                raise ValueError("no environment")
            environ.append((key, value))
        return cls(facts, tuple(map(_stream, streams)), tuple(words[:count]), tuple(environ))


def _stream(text: bytes) -> Stream | None:
    if not text:
        return None
    encoding, errors, line_buffering, write_through = text.decode("ascii").split(" ")
    return Stream(encoding, errors, line_buffering == "1", write_through == "1")


def work(connection: int, body: bytes, facts: bytes) -> NoReturn:
    """Run the command of one request in this fork, then exit. Never return into the server's loop."""
    code = 1
    try:
        with socket.socket(fileno=connection) as client:
            client.setblocking(True)
            _close_others(connection)
            try:
                request = Request.parse(body)
                become(client, request, facts)
            except (Differs, OSError, ValueError, LookupError) as error:
                client.sendall(f"no: {error}"[:200].encode("utf-8", "backslashreplace") + b"\n")
                os._exit(0)
            own = os.pidfd_open(os.getpid())
            socket.send_fds(client, [b"ready\n"], [own])
            os.close(own)
            reply, passed, _, _ = client.recvmsg(8, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC)
            if reply != b"go\n":
                os._exit(0)  # the client does the work itself, or is gone
            alive, *streams = array.array("i", passed[0][2])
            _die_with(alive)
            _open_streams(request.streams, streams)
            code = _run(client)
    except OSError:  # the client was gone before it sent `go`
        pass
    finally:
        os._exit(code)


def _close_others(kept: int) -> None:
    """Close every descriptor of the server except the standard streams, which are replaced later, and `kept`."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing is closed already
                os.close(fd)


def become(client: socket.socket, request: Request, facts: bytes) -> None:
    """Take over everything of the client except its streams. Raise Differs if that is not possible.

    The streams arrive with `go`: if they were sent to a fork that then hangs, a reader of the client's output would
    never see its end."""
    if request.facts != facts:
        raise Differs("another program")
    pid, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != 0 or pid <= 0:
        raise Differs("user")
    os.setsid()
    peer = inherit.Peer(pid)
    peer.take_over()
    os.environ.clear()
    for key, value in request.environ:
        os.environb[key] = value
    inherit.read_environment_again()
    sys.argv = [os.fsdecode(word) for word in request.argv]
    gc.enable()
    peer.take_over_signals()  # last: from here on signals end this process as they would the client
    peer.close()


def _die_with(alive: int) -> None:
    """Let the kernel kill this process, but none of its children, when the client ends: `alive` is a pipe that closes
    with the client."""
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    gone = select.poll()
    gone.register(alive, select.POLLIN)
    if gone.poll(0):
        os._exit(0)


def _open_streams(wanted: tuple[Stream | None, ...], fds: list[int]) -> None:
    """Open the client's streams as this process's. A stream that the client lacks is closed here too: `cli.main`
    decides what to do about it."""
    given = iter(fds)
    for number, (name, like) in enumerate(zip(_STREAMS, wanted, strict=True)):
        stream: io.TextIOWrapper | None = None
        if like is None:
            os.close(number)
        else:
            fd = next(given)
            os.dup2(fd, number)
            os.close(fd)
            stream = _text(number, name, like)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _text(number: int, name: str, like: Stream) -> io.TextIOWrapper:
    """Open a text stream as the interpreter opens the standard streams at its start."""
    raw = io.FileIO(number, "w" if number else "r", closefd=False)
    raw.name = f"<{name}>"
    buffer: io.BufferedReader | io.BufferedWriter | io.FileIO = raw
    if number == 0:
        buffer = io.BufferedReader(raw)
    elif not like.write_through:
        buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, like.encoding, like.errors, "\n", like.line_buffering, like.write_through)


def _run(client: socket.socket) -> int:
    """Run the command and what an interpreter does at exit, and send the exit status to the client."""
    from cmdop_migrate.cli.main import main

    code: object = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - print it as the interpreter would
        traceback.print_exc()
    try:
        if code != INTERRUPTED:
            threading._shutdown()  # type: ignore[attr-defined] # joins threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, KeyboardInterrupt):
        pass  # the reader is gone
    status = code & 0xFF if isinstance(code, int) else int(code is not None)
    with contextlib.suppress(OSError):
        client.sendall(b"status %d\n" % (status << 8))
    return status
