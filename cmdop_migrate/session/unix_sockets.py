"""Ask the kernel for the unix sockets of a network namespace: sock_diag(7), one request.

It tells what /proc/net/unix does not: the peer of a socket, the clients in the backlog of a listener, and how much was
sent that was not received.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from cmdop_migrate.holder import syscalls

LISTEN, ESTABLISHED = 10, 1
_DIAG, _BY_FAMILY = 4, 20
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_HEADER, _MESSAGE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBxI8x"), struct.Struct("=HH")
_SHOW = 0x1 | 0x4 | 0x8 | 0x10  # name, peer, backlog, queues
_NAME, _PEER, _BACKLOG, _QUEUES, _SHUTDOWN = 0, 2, 3, 4, 6
_BOTH = 3  # of shutdown(2)
_SEQUENCE = 7
TIMEOUT = 10.0


@dataclass(frozen=True)
class UnixSocket:
    """Describe one socket. `waiting`: the inode numbers of the clients in a listener's backlog, 0 for one that has
    closed its end. `peer` is 0 if it has none, or its peer is in a backlog. `unread`: bytes sent that the peer has not
    received."""

    inode: int
    kind: int
    state: int
    name: str = ""
    peer: int = 0
    waiting: tuple[int, ...] = ()
    unread: int = 0
    shutdown: int = 0

    @property
    def is_dangling(self) -> bool:
        """Return whether it is connected to a socket that no process has: a connection not yet accepted."""
        is_stream = self.kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
        return is_stream and self.state == ESTABLISHED and not self.peer and self.shutdown != _BOTH


def read(pid: int) -> dict[int, UnixSocket]:
    """Return the sockets of the network namespace of `pid`, by inode number. Raise OSError if the process is gone, or
    the kernel has no unix_diag."""
    with _open_in(pid) as sock:
        body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW, 0xFFFFFFFF, 0xFFFFFFFF)
        sock.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST_DUMP, _SEQUENCE, 0) + body)
        return {answer.inode: answer for answer in _answers(sock) if answer.inode}


def _answers(sock: socket.socket) -> Iterator[UnixSocket]:
    while True:
        data = sock.recv(256 << 10)
        while data:
            length, kind, _, _, _ = _HEADER.unpack_from(data)
            if kind == _DONE:
                return
            if kind == _ERROR:
                code = -struct.unpack_from("=i", data, _HEADER.size)[0]
                raise OSError(code, os.strerror(code))
            yield parse(data[_HEADER.size : length])
            data = data[length + -length % 4 :]


def parse(message: bytes) -> UnixSocket:
    """Decode one unix_diag_msg and its attributes."""
    _, kind, state, inode = _MESSAGE.unpack_from(message)
    found: dict[int, bytes] = {}
    at = _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(message):
        length, number = _ATTRIBUTE.unpack_from(message, at)
        found[number] = message[at + _ATTRIBUTE.size : at + length]
        at += max(length + -length % 4, _ATTRIBUTE.size)
    waiting = found.get(_BACKLOG, b"")
    queues = struct.unpack("=II", found[_QUEUES]) if len(found.get(_QUEUES, b"")) == 8 else (0, 0)
    return UnixSocket(
        inode=inode,
        kind=kind,
        state=state,
        name=os.fsdecode(found.get(_NAME, b"").rstrip(b"\0")).replace("\0", "@", 1),
        peer=struct.unpack("=I", found[_PEER])[0] if _PEER in found else 0,
        waiting=struct.unpack(f"={len(waiting) // 4}I", waiting),
        unread=queues[1] if state == ESTABLISHED else 0,
        shutdown=(found.get(_SHUTDOWN) or b"\0")[0],
    )


def _open_in(pid: int) -> socket.socket:
    """Open a socket in another network namespace. A socket belongs permanently to the namespace it is created in: a
    thread enters that, creates the socket and ends."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def make() -> None:
        try:
            there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                syscalls.setns(there, syscalls.NEWNET)
                made.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _DIAG))
            finally:
                os.close(there)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=make, name="netns")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    made[0].settimeout(TIMEOUT)
    return made[0]
