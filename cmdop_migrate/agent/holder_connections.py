"""Send messages from the agent to the holders of this host, without blocking: a holder that hangs does not delay the
others."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path

from cmdop_migrate.holder import protocol


class HolderConnections:
    """Keep one connection to each holder, and reconnect when it breaks."""

    def __init__(self, path: Callable[[str], Path]) -> None:
        """Connect to the sockets at `path`, which returns where a session's holder listens."""
        self._path = path
        self._sockets: dict[str, socket.socket] = {}
        self._decoders: dict[str, protocol.Decoder] = {}
        self.idle: dict[str, float] = {}  # seconds, as each holder answered to the message before the last

    def send(self, session: str, **message: object) -> bool:
        """Send a message to a holder. Return False if the holder is gone or does not read: the next renewal sends it
        again."""
        data = protocol.control(message)
        for _ in range(2):  # the second time over a new connection
            try:
                sock = self._sockets.get(session) or self._connect(session)
                self._sockets[session] = sock
                self._read_answers(session, sock)
                if sock.send(data) == len(data):
                    return True
            except BlockingIOError:
                # The holder hangs. Keep the connection: a new one for every try would fill its queue permanently.
                return False
            except (OSError, protocol.ProtocolError):
                pass
            self.drop(session)
        return False

    def drop(self, session: str) -> None:
        """Close the connection to one session's holder."""
        self.idle.pop(session, None)
        self._decoders.pop(session, None)
        sock = self._sockets.pop(session, None)
        if sock is not None:
            sock.close()

    def keep_only(self, sessions: Collection[str]) -> None:
        """Close connections to sessions not in `sessions`."""
        for session in [known for known in self._sockets if known not in sessions]:
            self.drop(session)

    def _read_answers(self, session: str, sock: socket.socket) -> None:
        """Read the answers that have arrived. Keep how long the session has been idle, ignore the rest."""
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
