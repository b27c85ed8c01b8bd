"""Connect to a session's holder."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cmdop_migrate.errors import SessionExited, TimedOut, Unexpected
from cmdop_migrate.holder import protocol
from cmdop_migrate.model import Exit

ANSWER_TIMEOUT = 10.0


class HolderGone(Exception):
    """Report that the connection ended without an exit event: the session ended, or its holder did."""


class Channel:
    """Send requests to one session's holder and read its output. Use as a context manager."""

    def __init__(self, place: Path | socket.socket) -> None:
        """Connect to `place`, the path of the holder's socket; or use that connection. Raise HolderGone or TimedOut."""
        try:
            self.sock = place if isinstance(place, socket.socket) else protocol.connect(str(place), ANSWER_TIMEOUT)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise HolderGone from error
        except BlockingIOError as error:
            raise _silent(ANSWER_TIMEOUT) from error
        self._decoder = protocol.Decoder(protocol.MAX_ANSWER)
        self._frames: list[tuple[int, bytes]] = []

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()

    def fileno(self) -> int:
        return self.sock.fileno()

    def ask(self, *, timeout: float = ANSWER_TIMEOUT, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer; only before following output on this channel. Raise HolderGone when the
        session ends before it answers, TimedOut, Unexpected."""
        self._send(protocol.control(request))
        until = time.monotonic() + timeout
        while True:
            frame = self._next(until - time.monotonic())
            if frame is None:
                raise _silent(timeout)
            if frame[0] != protocol.CONTROL:
                continue
            message = protocol.parse_control(frame[1])
            if "re" in message:
                return message
            if message.get("event") == "exit":
                raise HolderGone
            if message.get("error") == "protocol":
                raise Unexpected(
                    f"the holder did not understand: {message.get('message')}", "Is it of another version?"
                )

    def type(self, data: bytes) -> None:
        """Send input without numbers."""
        self._send(protocol.typed(data))

    def resize(self, rows: int, cols: int) -> None:
        """Set the size of the session's terminal."""
        self._send(protocol.control({"op": "resize", "rows": rows, "cols": cols}))

    def _send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except BlockingIOError as error:
            raise _silent(ANSWER_TIMEOUT) from error
        except OSError as error:
            raise HolderGone from error

    def follow(self, timeout: float | None = None) -> Iterator[tuple[int, bytes] | dict[str, Any]]:
        """Yield (seq, bytes) of output and dicts of events, until the exit event, which is the last, or until
        `timeout`."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            frame = self._next(None if until is None else until - time.monotonic())
            if frame is None:
                return
            message = self.read(frame)
            yield message
            if isinstance(message, dict) and message.get("event") == "exit":
                return

    def read(self, frame: tuple[int, bytes]) -> tuple[int, bytes] | dict[str, Any]:
        """Parse a frame."""
        kind, payload = frame
        return protocol.parse_output(payload) if kind == protocol.OUTPUT else protocol.parse_control(payload)

    def pending(self) -> list[tuple[int, bytes]]:
        """Return the frames that have arrived already, or that a readable socket has now."""
        if not self._frames:
            self._receive()
        frames, self._frames = self._frames, []
        return frames

    def has_frames(self) -> bool:
        """Return whether `pending` has frames that arrived with an answer: the socket does not become readable for
        them."""
        return bool(self._frames)

    def _next(self, timeout: float | None) -> tuple[int, bytes] | None:
        until = None if timeout is None else time.monotonic() + timeout
        while not self._frames:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self.sock], [], [], left)[0]:
                return None
            self._receive()
        return self._frames.pop(0)

    def _receive(self) -> None:
        try:
            data = self.sock.recv(256 << 10)
        except BlockingIOError:
            return
        except OSError as error:
            raise HolderGone from error
        if not data:
            raise HolderGone
        try:
            self._frames += self._decoder.feed(data)
        except protocol.ProtocolError as error:
            raise Unexpected(f"the holder speaks another protocol: {error}", "Is it of another version?") from error


def _silent(timeout: float) -> TimedOut:
    hint = "It may be stopped; see its state with: cmdop-migrate show"
    return TimedOut(f"the session's holder did not answer within {timeout:.0f} s", hint)


def exited(name: str, end: Exit | None, otherwise: str = "it was removed") -> SessionExited:
    """Return the error for a session that ended as `end` tells; `otherwise` is the reason if its record has no end."""
    if end is not None and end.kind == "moved":
        hint = "Use it there; its output up to then: output " + name
        return SessionExited(f"session {name!r} has {end.reason}", hint)
    reason = end.reason if end is not None else otherwise
    return SessionExited(f"session {name!r} is over: {reason}", "Its last output is kept: cmdop-migrate output " + name)
