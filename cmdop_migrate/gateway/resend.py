"""Carry a client's conversation with a holder over channels that break: input exactly once, output from the next byte.

Pure: the caller reports what happened and carries out the actions that are returned. On one side is a client that
speaks to a holder (holder/protocol.py) and knows of no relay; on the other a channel to the host where the session
runs now, or none.

    event                            reaction
    the client sends a request       keep it until it is answered; send it when a channel is open
    the client types                 number the bytes, keep them until they are applied; send them once `attach` was
                                     answered on this channel
    a channel opens                  send `attach` again, from the next byte of output that is needed; then requests
                                     without a reply
    `attach` is answered again       hide the reply from the client; send typed bytes again that are not applied yet
    output arrives                   pass each byte on once
    the session ends                 pass the event on; nothing follows
    the session moved or is parked   tell the client; a new channel will open
    the session has less than seen   tell the client how much was undone; continue from there
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from cmdop_migrate.model import exit_kind
from cmdop_migrate.session.stream import Item, Message

KEPT = 64 << 10  # typed bytes that are not known to be applied; beyond this the keyboard is not read
TYPE_STEP = 4096
RETRY_BUSY = 0.1  # seconds until a request is repeated that a frozen session refused
BUSY = "checkpointing"


@dataclass(frozen=True)
class ToClient:
    """Hand this to the client."""

    item: Item


@dataclass(frozen=True)
class ToHolder:
    """Send this to the holder, over the channel that is open."""

    message: Message


@dataclass(frozen=True)
class Retry:
    """Call `retry` after this time."""

    seconds: float


@dataclass(frozen=True)
class Ended:
    """Stop: the session has ended, and the client has been told."""


Action = ToClient | ToHolder | Retry | Ended


def _new_stream() -> str:
    return os.urandom(8).hex()


class ResendBuffer:
    """Represent the state of one client's conversation with one session."""

    def __init__(self, new_stream: Callable[[], str] = _new_stream) -> None:
        self._new_stream = new_stream
        self._attach: Message | None = None  # the request for the next channel
        self._is_answered = False  # once, on any channel: the client must not see a second reply
        self._is_attached = False  # on this channel
        self._is_read_only = False  # the host applies nothing that this client types
        self._is_open = False
        self._next = 0  # number of the next byte of output
        self._unanswered: list[Message] = []
        self._base, self._typed = 0, bytearray()  # number of applied input bytes; the bytes after them
        self._refused: Message | None = None  # a request to be repeated, refused because the session is frozen
        self._token = self._seen = 0  # fencing token of this channel's incarnation; of the last one that sent output
        self.status: Message | None = None  # the last event that told the client why nothing arrives

    @property
    def has_room(self) -> bool:
        """Return whether the client may type more."""
        return len(self._typed) < KEPT

    # From the client

    def request(self, message: Message) -> list[Action]:
        """Take a control message from the client."""
        op = message.get("op")
        if op == "resize":
            if self._attach is not None:
                self._attach |= {"rows": message["rows"], "cols": message["cols"]}
            return [ToHolder(message)] if self._is_attached else []
        if op == "attach":
            if not message.get("read_only"):
                message["stream"] = self._new_stream()
            self._attach = message
        elif op == "send":
            message["stream"] = self._new_stream()
        self._unanswered.append(message)
        return [ToHolder(message)] if self._is_open else []

    def type(self, data: bytes) -> list[Action]:
        """Take typed bytes from the client."""
        if self._is_read_only:
            return [ToClient({"event": "refused", "bytes": len(data), "why": "not_admitted"})]
        at = self._base + len(self._typed)
        self._typed += data
        return self._send_typed(at) if self._is_attached else []

    def _send_typed(self, start: int) -> list[Action]:
        actions: list[Action] = []
        for at in range(start, self._base + len(self._typed), TYPE_STEP):
            piece = bytes(self._typed[at - self._base : at - self._base + TYPE_STEP])
            actions.append(ToHolder({"op": "type", "at": at, "data": piece.decode("latin-1")}))
        return actions

    # From the channel

    def opened(self, token: int) -> list[Action]:
        """Record that a channel to the incarnation with this fencing token is open."""
        self._is_open, self._is_attached, self._refused = True, False, None
        self._token = token
        actions: list[Action] = []
        if self._attach is not None and self._is_answered:
            actions.append(self._attach_again())
        return actions + [ToHolder(message) for message in self._unanswered]

    def closed(self) -> None:
        """Record that there is no channel."""
        self._is_open = self._is_attached = False

    def retry(self) -> list[Action]:
        """Repeat the request that a frozen session refused."""
        message, self._refused = self._refused, None
        return [ToHolder(message)] if self._is_open and message is not None else []

    def from_holder(self, item: Item) -> list[Action]:
        """Take output or a message that the holder sent."""
        if isinstance(item, tuple):
            return self._output(*item)
        event = item.get("event")
        if item.get("re") == "attach":
            return self._attached(item)
        if "re" in item:
            return self._answered(item)
        if event == "applied":
            self._applied(int(item["at"]))
            return []
        if event == "refused" and item.get("why") == "gap":
            return self._undone(int(item["at"]), 0)
        if event == "lost":
            if not self._is_attached:
                return []
            self._next = int(item["from"]) + int(item["bytes"])
        if event == "moving":
            return self.show_status({"event": "moving", "to": item.get("to")})
        if event == "stays":
            return self._resumed()
        if event == "exit":
            return self._exit(item)
        return [ToClient(item)]

    def _output(self, seq: int, data: bytes) -> list[Action]:
        fresh = data[max(0, self._next - seq) :]
        if not fresh or not self._is_attached:
            return []
        seq += len(data) - len(fresh)
        self._next = seq + len(fresh)
        return [ToClient((seq, fresh))]

    def _attached(self, reply: Message) -> list[Action]:
        if not self._is_answered:
            self._unanswered = [message for message in self._unanswered if message.get("op") != "attach"]
            if "error" in reply:
                return [ToClient(reply)]
            assert self._attach is not None
            start = self._attach.get("from")
            self._next = int(reply["start"]) if start is None else max(int(start), 0)
            self._is_answered = self._is_attached = True
            self._seen = self._token
            if "stream" in self._attach and "applied" not in reply:
                self._is_read_only = True
                refused, self._typed = bytes(self._typed), bytearray()
                return [ToClient(reply), *(self.type(refused) if refused else [])]
            shown = {key: value for key, value in reply.items() if key != "applied"}
            return [ToClient(shown), *self._resumed(), *self._send_typed(self._base)]
        since = reply["end"] if reply.get("error") == "range" else reply.get("since")
        if since is not None and since < self._next:
            # The session was restored from a state before the output we have seen, and has printed other bytes since.
            undone, self._next, self._seen = self._next - since, since, self._token
            event = {"event": "undone", "output": undone, "input": 0}
            return [ToClient(event), self._attach_again()]
        self._is_attached, self._seen = True, self._token
        actions = self._resumed()
        applied = reply.get("applied")
        if applied is None:
            return actions
        if int(applied) < self._base:
            return actions + self._undone(int(applied), self._base - int(applied))
        self._applied(int(applied))
        return actions + self._send_typed(self._base)

    def _attach_again(self) -> ToHolder:
        """Return `attach`, from the next byte of output of the incarnation that sent output last."""
        assert self._attach is not None
        return ToHolder(self._attach | {"from": self._next, "token": self._seen})

    def _applied(self, at: int) -> None:
        count = min(max(0, at - self._base), len(self._typed))
        del self._typed[:count]
        self._base += count

    def _undone(self, applied: int, count: int) -> list[Action]:
        """Renumber the kept bytes from `applied`: the session has less input than it reported as applied."""
        count = count or max(0, self._base - applied)
        self._base = applied
        actions: list[Action] = []
        if count:
            actions = [ToClient({"event": "undone", "output": 0, "input": count})]
        return actions + self._send_typed(applied)

    def _answered(self, reply: Message) -> list[Action]:
        for number, message in enumerate(self._unanswered):
            if message.get("op") == reply["re"]:
                if reply.get("error") == BUSY:
                    # The session is frozen, to be moved or saved: repeat the request there, or here a moment later.
                    self._refused = message
                    return [Retry(RETRY_BUSY)]
                del self._unanswered[number]
                break
        return [ToClient(reply)]

    def _exit(self, message: Message) -> list[Action]:
        """Take the exit event: pass it on if the session has ended, not if only this incarnation has."""
        if message.get("checkpoint") is not None:
            return self.show_status({"event": "parked"})
        if message.get("code") is None or exit_kind(message) == "superseded":
            return self.show_status({"event": "moving", "to": None})
        return [*self._resumed(), ToClient(message), Ended()]

    # Where the session is

    def relay_status(self, state: str, to: object) -> list[Action]:
        """Take the relay's word on where the session is, while there is no channel."""
        if state == "routed":
            return []  # a channel opens in a moment
        return self.show_status({"event": state, "to": to} if state == "moving" else {"event": state})

    def show_status(self, status: Message) -> list[Action]:
        """Tell a client that is attached why nothing arrives, once."""
        before = self.status or {}
        is_less = status["event"] == before.get("event") and status.get("to") is None
        if self._attach is None or is_less or status == before:
            return []
        self.status = status
        return [ToClient(status)]

    def _resumed(self) -> list[Action]:
        if self.status is None:
            return []
        self.status = None
        return [ToClient({"event": "resumed"})]
