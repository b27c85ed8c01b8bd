"""Proxy TCP connections for tests, with one fault at a given byte: cut the connection, flip a bit, call a function.

with Proxy(server.port) as proxy:
    proxy.after("up", 1 << 20)                      # cut when 1 MiB more has gone to the server
    proxy.after("down", 0, then=server.stop)        # kill the server at its next answer
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

Way = Literal["up", "down"]


@dataclass
class _Trap:
    """Spring once, at the first byte past `left`."""

    left: int
    then: Callable[[], object] | None
    flip: bool
    sprung: threading.Event = field(default_factory=threading.Event)


class Proxy:
    """Listen on a free port, on loopback by default, and hand everything on to `port`."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self._target = port
        self._traps: dict[Way, _Trap] = {}
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server((address, 0))
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = f"http://{address}:{self.port}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self.rate = 0  # bytes a second and way, over all connections; 0: no limit
        self._turn = threading.Lock()
        self._blocked = False

    def block(self) -> None:
        """Let nothing through from now on, and refuse new connections immediately, as when the server is away."""
        with self._lock:
            self._blocked = True  # a thread that accepts a connection reads it under the same lock
            held = list(self._sockets)
        for one in held:
            _reset(one)

    def unblock(self) -> None:
        self._blocked = False

    def after(
        self, way: Way, count: int, then: Callable[[], object] | None = None, flip: bool = False
    ) -> threading.Event:
        """Set a trap that springs after `count` more bytes in this direction: it calls `then` and cuts the connection, or
        with `flip` turns a bit of the next piece and keeps the connection. Return an event that is set when it sprang."""
        trap = _Trap(count, then, flip)
        with self._lock:
            self._traps[way] = trap
        return trap.sprung

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # shutdown wakes the thread that waits in accept; close alone does not
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.block()
        self._thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._blocked:
                _reset(client)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target), 5)
            except OSError:
                _reset(client)
                continue
            with self._lock:
                blocked = self._blocked
                self._sockets |= {client, server}
            if blocked:
                _reset(client)
                _reset(server)
                continue
            threading.Thread(target=self._pump, args=(client, server, "up"), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, "down"), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        try:
            while data := source.recv(65536):
                if rate := self.rate:
                    with self._turn:
                        time.sleep(len(data) / rate)
                passed, trap = self._through(way, data)
                sink.sendall(passed)
                if trap is not None:
                    if trap.then is not None:
                        trap.then()
                    trap.sprung.set()
                    _reset(source)
                    _reset(sink)
                    return
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            _reset(source)
            _reset(sink)

    def _through(self, way: Way, data: bytes) -> tuple[bytes, _Trap | None]:
        """Return what is handed on, and the trap that springs after it."""
        with self._lock:
            if self._blocked:
                raise ConnectionResetError
            trap = self._traps.get(way)
            if trap is None:
                return data, None
            if len(data) <= trap.left:
                trap.left -= len(data)
                return data, None
            del self._traps[way]
        if trap.flip:
            trap.sprung.set()
            return data[:-1] + bytes([data[-1] ^ 1]), None
        return data[: trap.left], trap


def _reset(one: socket.socket) -> None:
    """Close with RST, as a dead host or a cut wire appears from here; this also wakes a thread that reads from it."""
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        one.close()
