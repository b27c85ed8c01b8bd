"""Serve CRIU's page-server protocol.

CRIU connects as a client and sends runs of pages, each with its address. `receive` reads each run directly into buffers
of the sink, so that a page is copied once, from the kernel. A sink that is slow to provide the next buffer blocks CRIU:
memory stays bounded.
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
_MAX_RUN = 1 << 40 >> 12  # pages; CRIU sends no longer run
SNDBUFFORCE = 32  # SO_SNDBUFFORCE, for which Python has no name
_ROOM = 8 << 20
Buffer = bytes | bytearray | memoryview


class ProtocolError(Exception):
    """Signal that the peer violates the protocol, or closes the connection in the middle of it."""


@dataclass(frozen=True)
class Target:
    """Describe the owner of pages: a process by its pid inside the session, or a shared memory segment by its id."""

    kind: str
    id: int


class PageSink(Protocol):
    """Receive dumped pages."""

    def open(self, target: Target) -> bool:
        """Begin a target: the runs that follow belong to it. Each target is opened once. Return True if an earlier copy
        of it is known; then CRIU may send unchanged memory as a run with PARENT, without its pages."""

    def run(self, vaddr: int, nr_pages: int, flags: int) -> None:
        """Begin a run. With PRESENT its pages follow through `window`; without PRESENT it has no pages."""

    def window(self, vaddr: int, size: int) -> memoryview:
        """Return a writable buffer for the bytes at `vaddr`: at least one byte, at most `size` (the rest of the run).
        It may block until memory is free. The buffer is full when the next method is called."""

    def done(self) -> None:
        """Finish: all pages of the dump have arrived. CRIU gets its answer, and so can succeed, when this returns."""


class PageSource(Protocol):
    """Supply restored pages."""

    def read(self, target: Target, vaddr: int, nr_pages: int) -> Sequence[Buffer]:
        """Return `target`'s pages at `vaddr` in one or several buffers: a whole number of pages, at least one, at most
        `nr_pages`. Raise when it cannot supply the true bytes: nothing else may be returned instead."""


def channel() -> tuple[socket.socket, socket.socket]:
    """Return our end and CRIU's end of a socket pair with a large buffer: each time one side waits for the other costs
    time."""
    ours, theirs = socket.socketpair()
    with contextlib.suppress(PermissionError):
        theirs.setsockopt(socket.SOL_SOCKET, SNDBUFFORCE, _ROOM)
    return ours, theirs


class Wire:
    """Read headers and payloads on a stream socket, for one CRIU version."""

    def __init__(self, sock: socket.socket, version: tuple[int, ...]) -> None:
        self.sock = sock
        # u64 nr_pages since 4.2, u32 before; padding where C puts it.
        self._header = struct.Struct("<IxxxxQQQ" if version >= (4, 2) else "<IIQQ")
        self._buffer = bytearray(self._header.size)

    def next(self) -> tuple[int, int, int, int, int] | None:
        """Return (command, flags, nr_pages, vaddr, dst_id), or None when the peer closed between messages. Raise
        ProtocolError."""
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
        """Fill the buffer from the socket. Raise ProtocolError when the connection ends first."""
        while view:
            got = self.sock.recv_into(view, 0, socket.MSG_WAITALL)
            if not got:
                raise ProtocolError("the connection ended inside a message")
            view = view[got:]


def receive(sock: socket.socket, sink: PageSink, version: tuple[int, ...]) -> int:
    """Receive a whole dump and return the number of pages. Any error closes the socket, which makes CRIU fail the dump
    and leave the session unchanged. Raise ProtocolError when CRIU ends before it has reported the end of the dump; that
    is detected only if the caller has closed its own copy of CRIU's end."""
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
    """Read pages from the source. Raise ValueError if it returns more or less than its contract allows."""
    if nr_pages == 0:
        raise ProtocolError(f"a request for no pages at {vaddr:#x}")
    buffers = source.read(target, vaddr, nr_pages)
    size = sum(map(len, buffers))
    if size % PAGE or not 0 < size <= nr_pages * PAGE:
        raise ValueError(f"the source gave {size} bytes for {nr_pages} pages at {vaddr:#x}")
    return buffers
