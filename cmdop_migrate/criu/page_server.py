"""CRIU's page-server protocol.

CRIU connects as a client and sends runs of pages labelled by address;
`receive` reads each run straight into buffers the sink hands out, so a page is
copied once, from the kernel. A sink that is slow to hand out the next buffer
stops CRIU: memory stays bounded.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

PAGE = 4096
PARENT, LAZY, PRESENT = 1, 2, 4  # flags of a run, as in the pagemap
ADD, HOLE, OPEN, OPEN2, CHECK_PARENT, ADD_F = 1, 2, 3, 4, 5, 6
CLOSE, FORCE_CLOSE = 0x1023, 0x1024
_KINDS = {1: "process", 2: "shmem"}
_MAX_RUN = 1 << 40 >> 12  # pages; a longer run is not CRIU but noise
SNDBUFFORCE = 32  # SOSNDBUFFORCE, which Python has no name for
_ROOM = 8 << 20
Buffer = bytes | bytearray | memoryview


class ProtocolError(Exception):
    """The peer said something that is not this protocol, or left in the middle of it."""


@dataclass(frozen=True)
class Target:
    """Whose pages: a process by its pid inside the session, or a shared memory segment by its id."""

    kind: str
    id: int


class PageSink(Protocol):
    """Where dumped pages go."""

    def open(self, target: Target) -> bool:
        """What follows belongs to `target`. Each is opened once, before its first run. True: an earlier copy of it is
        known; what did not change since may come without its pages, as a run with PARENT."""

    def run(self, vaddr: int, nr_pages: int, flags: int) -> None:
        """A run begins. With PRESENT its pages follow through `window`; without, it has none."""

    def window(self, vaddr: int, size: int) -> memoryview:
        """A writable buffer for the bytes at `vaddr`: at least one, at most `size` (the rest of the run). May block
        until memory is free. It is full when the next method is called."""

    def done(self) -> None:
        """All pages of the dump are there. Only then is the dump told that it may succeed."""


class PageSource(Protocol):
    """Where restored pages come from."""

    def read(self, target: Target, vaddr: int, nr_pages: int) -> Sequence[Buffer]:
        """`target`'s pages at `vaddr` in one or several buffers: a whole number of pages, at least one, at most
        `nr_pages`. Raises when it cannot give the true bytes: nothing else may stand in for them."""


def channel() -> tuple[socket.socket, socket.socket]:
    """-> (ours, CRIU's end), with room for more than a moment's pages: each stop of the one for the other costs."""
    ours, theirs = socket.socketpair()
    with contextlib.suppress(PermissionError):
        theirs.setsockopt(socket.SOL_SOCKET, SNDBUFFORCE, _ROOM)
    return ours, theirs


class Wire:
    """Headers and payloads on a stream socket, for one CRIU version."""

    def __init__(self, sock: socket.socket, version: tuple[int, ...]) -> None:
        self.sock = sock
        # u64 nr_pages since 4.2, u32 before; padding where C puts it.
        self._header = struct.Struct("<IxxxxQQQ" if version >= (4, 2) else "<IIQQ")
        self._buffer = bytearray(self._header.size)

    def next(self) -> tuple[int, int, int, int, int] | None:
        """-> (command, flags, nr_pages, vaddr, dst_id), or None when the peer closed between messages."""
        view = memoryview(self._buffer)
        got = self.sock.recv_into(view, 0, socket.MSG_WAITALL)
        if not got:
            return None
        self.fill(view[got:])
        command, nr_pages, vaddr, dst = self._header.unpack(self._buffer)
        if nr_pages > _MAX_RUN or vaddr % PAGE:
            raise ProtocolError(f"command {command:#x} with {nr_pages} pages at {vaddr:#x}")
        return command & 0xFFFF, command >> 16, nr_pages, vaddr, dst

    def fill(self, view: memoryview) -> None:
        while view:
            got = self.sock.recv_into(view, 0, socket.MSG_WAITALL)
            if not got:
                raise ProtocolError("the connection ended inside a message")
            view = view[got:]


def receive(sock: socket.socket, sink: PageSink, version: tuple[int, ...]) -> int:
    """Take a whole dump; -> pages received. Any error closes the socket, which makes CRIU fail the dump and leave
    the session as it was. ProtocolError when CRIU went away before it said it was finished; this is only seen once the
    caller has closed its own copy of CRIU's end."""
    wire, total, seen = Wire(sock, version), 0, set[Target]()
    try:
        while (message := wire.next()) is not None:
            command, flags, nr_pages, vaddr, dst = message
            if command in (OPEN, OPEN2):
                target = Target(_kind(dst), dst >> 8)
                if target in seen:
                    raise ProtocolError(f"{target} opened twice")
                seen.add(target)
                known = sink.open(target)
                if command == OPEN2:
                    sock.sendall(b"\1" if known else b"\0")
            elif command in (ADD_F, ADD, HOLE):
                flags = {ADD_F: flags, ADD: PRESENT, HOLE: PARENT}[command]
                total += _take(wire, sink, vaddr, nr_pages, flags)
            elif command == CHECK_PARENT:
                sock.sendall(struct.pack("<i", 0))
            elif command in (CLOSE, FORCE_CLOSE):
                sink.done()
                sock.sendall(struct.pack("<i", 0))
                return total
            else:
                raise ProtocolError(f"unexpected command {command:#x}")
        raise ProtocolError("CRIU closed the connection before it had sent everything")
    finally:
        sock.close()


def _take(wire: Wire, sink: PageSink, vaddr: int, nr_pages: int, flags: int) -> int:
    sink.run(vaddr, nr_pages, flags)
    if not flags & PRESENT:
        return 0
    end = vaddr + nr_pages * PAGE
    while vaddr < end:
        view = sink.window(vaddr, end - vaddr)
        if not 0 < len(view) <= end - vaddr:
            raise ValueError(f"the sink gave {len(view)} bytes for {end - vaddr}")
        wire.fill(view)
        vaddr += len(view)
    return nr_pages


def _kind(dst: int) -> str:
    try:
        return _KINDS[dst & 0xFF]
    except KeyError:
        raise ProtocolError(f"unknown kind of pages {dst & 0xFF}") from None


def read(source: PageSource, target: Target, vaddr: int, nr_pages: int) -> Sequence[Buffer]:
    """Ask the source and hold it to its word."""
    if nr_pages == 0:
        raise ProtocolError(f"asked for no pages at {vaddr:#x}")
    buffers = source.read(target, vaddr, nr_pages)
    size = sum(map(len, buffers))
    if size % PAGE or not 0 < size <= nr_pages * PAGE:
        raise ValueError(f"the source gave {size} bytes for {nr_pages} pages at {vaddr:#x}")
    return buffers
