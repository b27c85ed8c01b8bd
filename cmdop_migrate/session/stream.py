"""Define the stream between a client and a holder: one interface for a local socket and for a relay.

`Stream` is what `attach` and all requests are written against. session/holder_client.py implements it over the
holder's unix socket, gateway/relay_channel.py over a relay connection that is made again when it breaks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cmdop_migrate.holder import protocol

Message = dict[str, Any]
Output = tuple[int, bytes]  # number of the first byte, and what the session printed
Item = Output | Message


@dataclass(frozen=True)
class Ready:
    """Represent what a wait has ended with. `items`: `receive` has something to return or an end to report."""

    items: bool
    room: bool
    readable: frozenset[int]


class Stream(ABC):
    """Carry requests and typed bytes to one session, and output and messages from it. One thread uses a stream."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a control message. Raise HolderGone if the stream has ended, TimedOut if the holder does not read."""

    @abstractmethod
    def type(self, data: bytes) -> None:
        """Send typed bytes; block while there is no room. Raise as `send` does."""

    @abstractmethod
    def has_room(self) -> bool:
        """Return whether `type` takes a few kilobytes without blocking."""

    @abstractmethod
    def receive(self) -> list[Item]:
        """Return all items that have arrived, without blocking. Raise HolderGone if nothing has arrived and
        the stream has ended."""

    @abstractmethod
    def wait(self, timeout: float | None, readers: Sequence[int] = (), for_room: bool = False) -> Ready:
        """Block until an item arrives, a descriptor of `readers` is readable, there is room (with `for_room`), or
        `timeout` seconds have passed."""

    @abstractmethod
    def close(self) -> None:
        """Close the stream. The session keeps running."""


def parse_frame(kind: int, payload: bytes) -> Item:
    """Return the item in a frame that a holder sent. Raise ProtocolError if the payload is invalid."""
    return protocol.parse_output(payload) if kind == protocol.OUTPUT else protocol.parse_control(payload)
