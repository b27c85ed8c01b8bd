"""A client's talk with a holder, carried over channels that come and go. Pure: what to send after what has happened.

On one side is a local client that speaks to a holder (holder/protocol.py) and knows
of no relay; on the other a channel to wherever the session runs now, or none.

    happens                        then
    the client asks something      kept until it is answered; sent when a channel is open
    the client types               numbered, kept until it is applied; sent once `attach` was answered on this channel
    a channel opens                `attach` again, from the next byte of output that is needed; then what is unanswered
    `attach` is answered again     not shown; typed bytes that are not applied yet are sent again
    output comes                   passed on, each byte once
    the session ends               passed on; that was all
    it moved, or was parked        not an end: the client is told, and a new channel will open
    less is there than was seen    the client is told how much was undone, and goes on from there
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cmdop_migrate.holder import protocol
from cmdop_migrate.model import exit_kind

KEPT = 64 << 10  # typed bytes that are not known to be applied; then the keyboard is not read
TYPE_STEP = 4096
AGAIN = 0.1
BUSY = "checkpointing"


@dataclass(frozen=True)
class ToClient:
    data: bytes


@dataclass(frozen=True)
class ToHolder:
    data: bytes


@dataclass(frozen=True)
class Again:
    """Call `again` after so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Over:
    """The session has ended, and the client knows."""


Act = ToClient | ToHolder | Again | Over
Message = dict[str, Any]


def _new_stream() -> str:
    return os.urandom(8).hex()


class Bridge:
    def __init__(self, new_stream: Callable[[], str] = _new_stream) -> None:
        self._new_stream = new_stream
        self._attach: Message | None = None  # as it will be asked on the next channel
        self._is_answered = False  # ever: then the client must not see another answer
        self._is_attached = False  # on this channel
        self._is_deaf = False  # it takes nothing that we type
        self._is_open = False
        self._next = 0  # of the output
        self._asked: list[Message] = []
        self._base, self._typed = 0, bytearray()  # of the input: how much is applied, and what is not
        self._put_off: Message | None = None  # refused for the moment
        self._token = self._seen = 0  # of the incarnation this channel goes to; of the last whose output was shown
        self.standing: Message | None = None  # what the client was told about the session's whereabouts

    @property
    def has_room(self) -> bool:
        """Whether the client may go on typing."""
        return len(self._typed) < KEPT

    # From the client

    def from_client(self, kind: int, payload: bytes) -> list[Act]:
        if kind == protocol.INPUT:
            return self._type(payload)
        message: Message = protocol.parse_control(payload)
        op = message.get("op")
        if op == "resize":
            if self._attach is not None:
                self._attach |= {"rows": message["rows"], "cols": message["cols"]}
            return [self._say(message)] if self._is_attached else []
        if op == "attach":
            if not message.get("read_only"):
                message["stream"] = self._new_stream()
            self._attach = message
        elif op == "send":
            message["stream"] = self._new_stream()
        self._asked.append(message)
        return [self._say(message)] if self._is_open else []

    def _type(self, data: bytes) -> list[Act]:
        if self._is_deaf:
            return [ToClient(protocol.control({"event": "refused", "bytes": len(data), "why": "not_admitted"}))]
        at = self._base + len(self._typed)
        self._typed += data
        return self._send_typed(at) if self._is_attached else []

    def _send_typed(self, start: int) -> list[Act]:
        acts: list[Act] = []
        for at in range(start, self._base + len(self._typed), TYPE_STEP):
            piece = bytes(self._typed[at - self._base : at - self._base + TYPE_STEP])
            acts.append(self._say({"op": "type", "at": at, "data": piece.decode("latin-1")}))
        return acts

    # From the channel

    def opened(self, token: int) -> list[Act]:
        """There is a channel, to the incarnation of this token."""
        self._is_open, self._is_attached, self._put_off = True, False, None
        self._token = token
        acts: list[Act] = []
        if self._attach is not None and self._is_answered:
            acts.append(self._ask_on())
        return acts + [self._say(one) for one in self._asked]

    def closed(self) -> None:
        self._is_open = self._is_attached = False

    def again(self) -> list[Act]:
        """What was put off, once more."""
        one, self._put_off = self._put_off, None
        return [self._say(one)] if self._is_open and one is not None else []

    def from_holder(self, kind: int, payload: bytes) -> list[Act]:
        if kind == protocol.OUTPUT:
            return self._output(*protocol.parse_output(payload))
        message: Message = protocol.parse_control(payload)
        event = message.get("event")
        if message.get("re") == "attach":
            return self._attached(message)
        if "re" in message:
            return self._answered(message)
        if event == "applied":
            self._applied(int(message["at"]))
            return []
        if event == "refused" and message.get("why") == "gap":
            return self._undone(int(message["at"]), 0)
        if event == "lost":
            if not self._is_attached:
                return []
            self._next = int(message["from"]) + int(message["bytes"])
        if event == "moving":
            return self.whereabouts({"event": "moving", "to": message.get("to")})
        if event == "stays":
            return self._goes_on()
        if event == "exit":
            return self._exit(message)
        return [ToClient(protocol.control(message))]

    def _output(self, seq: int, data: bytes) -> list[Act]:
        fresh = data[max(0, self._next - seq) :]
        if not fresh or not self._is_attached:
            return []
        seq += len(data) - len(fresh)
        self._next = seq + len(fresh)
        return [ToClient(protocol.output(seq, fresh))]

    def _attached(self, message: Message) -> list[Act]:
        if not self._is_answered:
            self._asked = [one for one in self._asked if one.get("op") != "attach"]
            if "error" in message:
                return [ToClient(protocol.control(message))]
            assert self._attach is not None
            wanted = self._attach.get("from")
            self._next = int(message["start"]) if wanted is None else max(int(wanted), 0)
            self._is_answered = self._is_attached = True
            self._seen = self._token
            if "stream" in self._attach and "applied" not in message:
                self._is_deaf = True
                refused, self._typed = bytes(self._typed), bytearray()
                return [ToClient(protocol.control(message)), *(self._type(refused) if refused else [])]
            shown = {key: value for key, value in message.items() if key != "applied"}
            return [ToClient(protocol.control(shown)), *self._goes_on(), *self._send_typed(self._base)]
        since = message["end"] if message.get("error") == "range" else message.get("since")
        if since is not None and since < self._next:
            # It was brought back from before what we have seen, and has gone another way since.
            undone, self._next, self._seen = self._next - since, since, self._token
            told = {"event": "undone", "output": undone, "input": 0}
            return [ToClient(protocol.control(told)), self._ask_on()]
        self._is_attached, self._seen = True, self._token
        acts = self._goes_on()
        applied = message.get("applied")
        if applied is None:
            return acts
        if int(applied) < self._base:
            return acts + self._undone(int(applied), self._base - int(applied))
        self._applied(int(applied))
        return acts + self._send_typed(self._base)

    def _ask_on(self) -> ToHolder:
        """`attach`, from where we are in the output of the incarnation we saw last."""
        assert self._attach is not None
        return self._say(self._attach | {"from": self._next, "token": self._seen})

    def _applied(self, at: int) -> None:
        count = min(max(0, at - self._base), len(self._typed))
        del self._typed[:count]
        self._base += count

    def _undone(self, applied: int, count: int) -> list[Act]:
        """Less of what was typed is there than we were told; what is left is numbered from there."""
        count = count or max(0, self._base - applied)
        self._base = applied
        told: list[Act] = []
        if count:
            told = [ToClient(protocol.control({"event": "undone", "output": 0, "input": count}))]
        return told + self._send_typed(applied)

    def _answered(self, message: Message) -> list[Act]:
        for number, one in enumerate(self._asked):
            if one.get("op") == message["re"]:
                if message.get("error") == BUSY:
                    # It stands still, to be moved or saved. Then it is said there, or here a moment later.
                    self._put_off = one
                    return [Again(AGAIN)]
                del self._asked[number]
                break
        return [ToClient(protocol.control(message))]

    def _exit(self, message: Message) -> list[Act]:
        """It is over, or only here."""
        if message.get("checkpoint") is not None:
            return self.whereabouts({"event": "parked"})
        if message.get("code") is None or exit_kind(message) == "superseded":
            return self.whereabouts({"event": "moving", "to": None})
        return [*self._goes_on(), ToClient(protocol.control(message)), Over()]

    # Where it is

    def whereabouts_of(self, state: str, to: object) -> list[Act]:
        """What the relay says of it, while there is no channel."""
        if state == "routed":
            return []  # then it is a moment only
        return self.whereabouts({"event": state, "to": to} if state == "moving" else {"event": state})

    def whereabouts(self, standing: Message) -> list[Act]:
        """Told to a client that watches, once."""
        before = self.standing or {}
        is_less = standing["event"] == before.get("event") and standing.get("to") is None
        if self._attach is None or is_less or standing == before:
            return []
        self.standing = standing
        return [ToClient(protocol.control(standing))]

    def _goes_on(self) -> list[Act]:
        if self.standing is None:
            return []
        self.standing = None
        return [ToClient(protocol.control({"event": "goes_on"}))]

    def _say(self, message: Message) -> ToHolder:
        return ToHolder(protocol.control(message))
