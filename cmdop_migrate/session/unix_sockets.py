"""List the unix sockets of a network namespace with one sock_diag(7) request.

The answer has what /proc/net/unix lacks: the peer of a socket, the clients in the backlog of a listener, and the bytes
that were sent and not received. pyroute2 is not used: it drops the mark that tells an abstract name from a path, and
reports no error when the kernel refuses a request (docs/decisions/0001-dependencies.md, `scripts/bench netlink`).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from cmdop_migrate.session import rtnetlink

LISTEN, ESTABLISHED = 10, 1
_DIAG, _BY_FAMILY = 4, 20
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_HEADER, _MESSAGE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBxI8x"), struct.Struct("=HH")
_SHOW = 0x1 | 0x4 | 0x8 | 0x10  # name, peer, backlog, queues
_NAME, _PEER, _BACKLOG, _QUEUES, _SHUTDOWN = 0, 2, 3, 4, 6
_BOTH = 3  # of shutdown(2)
_SEQUENCE = 7


@dataclass(frozen=True)
class UnixSocket:
    """Describe a unix socket. `waiting`: the inode numbers of the clients in a listener's backlog, 0 for one that has
    closed its end. `peer` is 0 if the socket has no peer, or the peer is in a backlog. `unread`: bytes sent that the
    peer has not received."""

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
        """Tell whether the socket is connected to one that no process has: the connection was not accepted yet."""
        is_stream = self.kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
        return is_stream and self.state == ESTABLISHED and not self.peer and self.shutdown != _BOTH


def read(pid: int) -> dict[int, UnixSocket]:
    """Return the sockets of the network namespace of `pid`, by inode number. Raise OSError when the process has ended,
    or the kernel has no unix_diag."""
    with rtnetlink.open_in(pid, _DIAG) as sock:
        body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW, 0xFFFFFFFF, 0xFFFFFFFF)
        sock.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST_DUMP, _SEQUENCE, 0) + body)
        return {found.inode: found for found in _answers(sock) if found.inode}


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
    attributes: dict[int, bytes] = {}
    at = _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(message):
        length, number = _ATTRIBUTE.unpack_from(message, at)
        attributes[number] = message[at + _ATTRIBUTE.size : at + length]
        at += max(length + -length % 4, _ATTRIBUTE.size)
    waiting = attributes.get(_BACKLOG, b"")
    queues = struct.unpack("=II", attributes[_QUEUES]) if len(attributes.get(_QUEUES, b"")) == 8 else (0, 0)
    return UnixSocket(
        inode=inode,
        kind=kind,
        state=state,
        name=os.fsdecode(attributes.get(_NAME, b"").rstrip(b"\0")).replace("\0", "@", 1),
        peer=struct.unpack("=I", attributes[_PEER])[0] if _PEER in attributes else 0,
        waiting=struct.unpack(f"={len(waiting) // 4}I", waiting),
        unread=queues[1] if state == ESTABLISHED else 0,
        shutdown=(attributes.get(_SHUTDOWN) or b"\0")[0],
    )
