"""Connect a client to a session's holder: requests, replies and output."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cmdop_migrate.errors import SessionExited, TimedOut, Unexpected
from cmdop_migrate.holder import protocol
from cmdop_migrate.model import Exit
from cmdop_migrate.session.stream import Item, Message, Ready, Stream, parse_frame

ANSWER_TIMEOUT = 10.0


class HolderGone(Exception):
    """Report that the connection ended without an exit event: the session ended, or its holder did."""


class Channel:
    """Send requests to one session and read its output, over any stream. Use as a context manager."""

    def __init__(self, place: Path | Stream) -> None:
        """Connect to `place`: the path of the holder's socket, or an open stream. Raise HolderGone if no holder listens
        there, TimedOut if it does not accept the connection."""
        self.stream = place if isinstance(place, Stream) else SocketStream(place)
        self._items: list[Item] = []

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the stream. The session keeps running."""
        self.stream.close()

    def fileno(self) -> int:
        """Return the descriptor of the holder's socket, to be inherited by a child; only on the session's host."""
        assert isinstance(self.stream, SocketStream)
        return self.stream.sock.fileno()

    def ask(self, *, timeout: float = ANSWER_TIMEOUT, **request: Any) -> Message:
        """Send a request and return the reply; only before following output on this channel.

        Raise HolderGone when the session ends before it replies, TimedOut after `timeout` seconds.
        """
        self.stream.send(request)
        until = time.monotonic() + timeout
        while True:
            item = self._next(until - time.monotonic())
            if item is None:
                raise _silent(timeout)
            if isinstance(item, tuple):
                continue
            if "re" in item:
                return item
            if item.get("event") == "exit":
                raise HolderGone
            if item.get("error") == "protocol":
                raise Unexpected(f"the holder did not understand: {item.get('message')}", "Is it of another version?")

    def send(self, message: Message) -> None:
        """Send a message without waiting for a reply."""
        self.stream.send(message)

    def type(self, data: bytes) -> None:
        """Send typed bytes. Block while there is no room."""
        self.stream.type(data)

    def resize(self, rows: int, cols: int) -> None:
        """Report the size of the client's terminal."""
        self.stream.send({"op": "resize", "rows": rows, "cols": cols})

    def follow(self, timeout: float | None = None) -> Iterator[Item]:
        """Yield (seq, bytes) of output and messages, until exit (its event is the last) or `timeout` runs out."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            item = self._next(None if until is None else until - time.monotonic())
            if item is None:
                return
            yield item
            if isinstance(item, dict) and item.get("event") == "exit":
                return

    def pending(self) -> list[Item]:
        """Return the items that have arrived. Raise HolderGone if the stream has ended."""
        items, self._items = self._items or self.stream.receive(), []
        return items

    def wait(self, readers: Sequence[int], for_room: bool) -> Ready:
        """Block until `pending` returns items, a descriptor is readable or, with `for_room`, there is room to type."""
        if not self._items:
            return self.stream.wait(None, readers, for_room)
        # Items that came along with a reply are here already: the stream does not report them.
        return replace(self.stream.wait(0, readers, for_room), items=True)

    def has_room(self) -> bool:
        """Return whether `type` and `resize` take a few kilobytes without blocking."""
        return self.stream.has_room()

    def _next(self, timeout: float | None) -> Item | None:
        until = None if timeout is None else time.monotonic() + timeout
        while not self._items:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not self.stream.wait(left).items:
                return None
            self._items = self.stream.receive()
        return self._items.pop(0)


class SocketStream(Stream):
    """Represent a stream over the unix socket of a holder on this host."""

    def __init__(self, path: Path) -> None:
        try:
            self.sock = protocol.connect(str(path), ANSWER_TIMEOUT)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise HolderGone from error
        except BlockingIOError as error:
            raise _silent(ANSWER_TIMEOUT) from error
        self._decoder = protocol.Decoder(protocol.MAX_ANSWER)

    def send(self, message: Message) -> None:
        self._send(protocol.control(message))

    def type(self, data: bytes) -> None:
        self._send(protocol.typed(data))

    def _send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except BlockingIOError as error:
            raise _silent(ANSWER_TIMEOUT) from error
        except OSError as error:
            raise HolderGone from error

    def has_room(self) -> bool:
        return bool(select.select([], [self.sock], [], 0)[1])

    def receive(self) -> list[Item]:
        try:
            data = self.sock.recv(256 << 10, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise HolderGone from error
        if not data:
            raise HolderGone
        try:
            return [parse_frame(*frame) for frame in self._decoder.feed(data)]
        except protocol.ProtocolError as error:
            raise Unexpected(f"the holder speaks another protocol: {error}", "Is it of another version?") from error

    def wait(self, timeout: float | None, readers: Sequence[int] = (), for_room: bool = False) -> Ready:
        own = self.sock.fileno()
        readable, room, _ = select.select([own, *readers], [own] if for_room else [], [], timeout)
        return Ready(own in readable, bool(room), frozenset(readable) - {own})

    def close(self) -> None:
        self.sock.close()


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
