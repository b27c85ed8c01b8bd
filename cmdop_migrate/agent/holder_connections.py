"""The agent's word to the holders of this host. Nothing waits here: a holder that hangs costs the others nothing."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path

from cmdop_migrate.holder import protocol


class Lines:
    """One connection to each holder, made anew when it broke."""

    def __init__(self, path: Callable[[str], Path]) -> None:
        """`path`: where a session's holder listens."""
        self._path = path
        self._open: dict[str, socket.socket] = {}
        self._decoders: dict[str, protocol.Decoder] = {}
        self.idle: dict[str, float] = {}  # seconds, as each holder answered to the word before the last

    def say(self, session: str, **message: object) -> bool:
        """False when the holder is gone, or takes nothing: it will be said again with the next renewal."""
        data = protocol.control(message)
        for _ in range(2):  # the second time over a fresh connection
            try:
                sock = self._open.get(session) or self._connect(session)
                self._open[session] = sock
                self._hear(session, sock)
                if sock.send(data) == len(data):
                    return True
            except BlockingIOError:
                # It hangs. The connection stays: a new one for every try would fill its queue up for good.
                return False
            except (OSError, protocol.ProtocolError):
                pass
            self.drop(session)
        return False

    def drop(self, session: str) -> None:
        self.idle.pop(session, None)
        self._decoders.pop(session, None)
        sock = self._open.pop(session, None)
        if sock is not None:
            sock.close()

    def keep(self, sessions: Collection[str]) -> None:
        """Those of all others are dropped."""
        for session in [one for one in self._open if one not in sessions]:
            self.drop(session)

    def _hear(self, session: str, sock: socket.socket) -> None:
        """Whatever was answered so far: how long it has been idle is kept, the rest is of no use."""
        decoder = self._decoders.setdefault(session, protocol.Decoder())
        with contextlib.suppress(BlockingIOError):
            while data := sock.recv(64 << 10):
                for kind, payload in decoder.feed(data):
                    idle = protocol.parse_control(payload).get("idle") if kind == protocol.CONTROL else None
                    if isinstance(idle, int | float):
                        self.idle[session] = float(idle)
            raise ConnectionResetError

    def _connect(self, session: str) -> socket.socket:
        path = self._path(session)
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            sock.connect(f"/proc/self/fd/{directory}/{path.name}")
        except OSError:
            sock.close()
            raise
        finally:
            os.close(directory)
        return sock
