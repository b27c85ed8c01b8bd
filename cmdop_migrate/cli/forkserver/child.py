"""A fork of the ready process becomes the process that its client would have been, and does its work.

It takes over what can be taken over, and compares the rest. Where anything
stays different it says so and ends, and the client does the work itself.
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

MOST_FDS = 4  # what ends with the client, and its streams
_STREAMS = ("stdin", "stdout", "stderr")


@dataclass(frozen=True)
class Stream:
    """As the client's interpreter made it."""

    encoding: str
    errors: str
    line_buffering: bool
    write_through: bool


@dataclass(frozen=True)
class Request:
    likeness: bytes
    streams: tuple[Stream | None, ...]
    argv: tuple[bytes, ...]
    environ: tuple[tuple[bytes, bytes], ...]

    @classmethod
    def parse(cls, body: bytes) -> Request:
        """ValueError when it is none."""
        likeness, *rest = body.split(b"\0")
        streams, count, words = rest[: len(_STREAMS)], int(rest[3]), rest[4:]
        if not 1 <= count <= len(words):
            raise ValueError("no command")
        environ = []
        for item in words[count:]:
            key, sign, value = item.partition(b"=")
            if not key or not sign:
                raise ValueError("no environment")
            environ.append((key, value))
        return cls(likeness, tuple(map(_stream, streams)), tuple(words[:count]), tuple(environ))


def _stream(text: bytes) -> Stream | None:
    if not text:
        return None
    encoding, errors, line_buffering, write_through = text.decode("ascii").split(" ")
    return Stream(encoding, errors, line_buffering == "1", write_through == "1")


def work(connection: int, body: bytes, likeness: bytes) -> NoReturn:
    """Never returns: a fork must not run on into what its parent does."""
    code = 1
    try:
        with socket.socket(fileno=connection) as client:
            client.setblocking(True)
            _close_others(connection)
            try:
                request = Request.parse(body)
                become(client, request, likeness)
            except (Differs, OSError, ValueError, LookupError) as error:
                client.sendall(f"no: {error}"[:200].encode("utf-8", "backslashreplace") + b"\n")
                os._exit(0)
            own = os.pidfd_open(os.getpid())
            socket.send_fds(client, [b"ready\n"], [own])
            os.close(own)
            word, passed, _, _ = client.recvmsg(8, socket.CMSG_SPACE(4 * MOST_FDS), socket.MSG_CMSG_CLOEXEC)
            if word != b"go\n":
                os._exit(0)  # it does its work itself, or is gone
            alive, *streams = array.array("i", passed[0][2])
            _die_with(alive)
            _open_streams(request.streams, streams)
            code = _run(client)
    except OSError:  # the client is gone before it said anything
        pass
    finally:
        os._exit(code)


def _close_others(kept: int) -> None:
    """Of the ready process, its other clients and their forks nothing stays open but the three streams, for now."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != kept:
            with contextlib.suppress(OSError):  # that of the listing is closed already
                os.close(fd)


def become(client: socket.socket, request: Request, likeness: bytes) -> None:
    """All but its streams. Those come with the word to begin: were they on their way to a process that hangs, nobody
    who reads what the client prints would see its end."""
    if request.likeness != likeness:
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
    peer.take_over_signals()  # last: from here on it is ended as any other
    peer.close()


def _die_with(alive: int) -> None:
    """`alive` ends with the client, however that ends; the kernel then kills this process, and none of its children."""
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    gone = select.poll()
    gone.register(alive, select.POLLIN)
    if gone.poll(0):
        os._exit(0)


def _open_streams(wanted: tuple[Stream | None, ...], fds: list[int]) -> None:
    """Where the client has none, there is none: what then becomes of it is decided by who does the work."""
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
    """As the interpreter makes them at its start."""
    raw = io.FileIO(number, "w" if number else "r", closefd=False)
    raw.name = f"<{name}>"
    buffer: io.BufferedReader | io.BufferedWriter | io.FileIO = raw
    if number == 0:
        buffer = io.BufferedReader(raw)
    elif not like.write_through:
        buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, like.encoding, like.errors, "\n", like.line_buffering, like.write_through)


def _run(client: socket.socket) -> int:
    """The command, to the end of what an interpreter does at its end; its client hears how it ended."""
    from cmdop_migrate.cli.main import main

    code: object = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as the interpreter would, where nobody is left to catch it
        traceback.print_exc()
    try:
        if code != INTERRUPTED:
            threading._shutdown()  # type: ignore[attr-defined] # waits for what was started
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, KeyboardInterrupt):
        pass  # nobody reads it any more
    status = code & 0xFF if isinstance(code, int) else int(code is not None)
    with contextlib.suppress(OSError):
        client.sendall(b"status %d\n" % (status << 8))
    return status
