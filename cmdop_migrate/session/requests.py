"""What is said over a channel to one session's holder, whichever way that channel goes: send, output, follow, wait."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cmdop_migrate.errors import Blocked, NotAdmitted, Usage
from cmdop_migrate.holder import protocol
from cmdop_migrate.session import screen
from cmdop_migrate.session.holder_client import ANSWER_TIMEOUT, Channel, HolderGone

LARGEST = protocol.MAX_PAYLOAD - (4 << 10)  # with what a relay adds to it
SEARCH_WINDOW = 64 << 10  # how far back a pattern may have begun


@dataclass(frozen=True)
class Output:
    data: bytes
    start: int
    end: int
    lost: int


def send(channel: Channel, name: str, data: bytes, actor: str, gate_timeout: float) -> dict[str, Any]:
    """One input, whole. HolderGone when the session ends before it is answered."""
    asks = 1 + data.count(b"\r") + data.count(b"\n")  # a gate may be asked about each line of it
    patience = ANSWER_TIMEOUT + asks * gate_timeout
    request: dict[str, Any] = {"op": "send", "data": data.decode("latin-1"), "actor": actor}
    if len(protocol.control(request)) > LARGEST:
        hint = "Send it in pieces; of 128 KiB each surely fits."
        raise Blocked(f"session {name!r}: {len(data)} bytes are more than can be sent at once; nothing was sent", hint)
    answer = channel.ask(**request, timeout=patience)
    if answer.get("error") == "full":
        hint = "It does not read its input. Look at it with: cmdop-migrate attach " + name
        raise Blocked(f"session {name!r} has too much unread input; nothing was sent", hint)
    if answer.get("error") == "checkpointing":
        raise Blocked(f"session {name!r} is being checkpointed; nothing was sent", "Send it again in a moment.")
    if answer.get("error") == "not_admitted":
        raise NotAdmitted(f"this credential may not type into session {name!r}", "It takes the role execute.")
    if answer.get("error") == "turn":
        hint = f"Ask for it: cmdop-migrate turn {name} request --actor {actor} --wait 5m"
        raise NotAdmitted(f"{answer['holder']} has the write turn of session {name!r}; nothing was sent", hint)
    if answer.get("error") == "gate":
        hint = f"The line was erased. What was asked and answered: cmdop-migrate inputs {name}"
        raise NotAdmitted(f"session {name!r}: {answer['why']}", hint)
    if answer.get("error"):
        raise Blocked(f"session {name!r} does not read its terminal any more", "See: cmdop-migrate ls")
    return {"seq": answer["seq"], "at": answer["at"]}


def output(channel: Channel, start: int | None) -> Output:
    """What is kept of it now, from `start`. HolderGone."""
    bounds = channel.ask(op="status")
    begin = first_of(bounds["start"], bounds["end"], start)
    channel.ask(**_reader(begin))
    end: int = bounds["end"]
    data, lost, first = bytearray(), begin - (begin if start is None else start), begin
    for message in channel.follow() if begin < end else ():
        if isinstance(message, tuple):
            data += message[1]
        elif message.get("event") == "lost":
            if data:
                break  # what we have is of one piece; who asks on from there will hear of the loss
            lost += message["bytes"]
            first = message["from"] + message["bytes"]
        if first + len(data) >= end:
            break
    del data[max(0, end - first) :]
    return Output(bytes(data), first, first + len(data), lost)


def _reader(start: int | None) -> dict[str, Any]:
    return {"op": "attach", "actor": "", "read_only": True, "from": start}


def first_of(first: int, end: int, start: int | None) -> int:
    """The first byte there is, of [first, end), for who wants to begin at `start`."""
    if start is not None and start > end:
        raise Usage(f"no output has number {start} yet", f"Give a number from {first} to {end}.")
    return max(first, start) if start is not None else first


def read_from(channel: Channel, start: int | None) -> int:
    """Asks for output from `start`, or all that is kept -> the number of the first byte that will come."""
    answer = channel.ask(**_reader(start))
    return first_of(answer["start"], answer["end"], start)


def follow(channel: Channel, start: int | None) -> Iterator[Output | dict[str, Any]]:
    """Pieces of output as they come, and events; of its end the last. HolderGone."""
    read_from(channel, start)
    for message in channel.follow():
        if isinstance(message, tuple):
            yield Output(message[1], message[0], message[0] + len(message[1]), 0)
        else:
            yield message


def wait(
    channel: Channel, matcher: re.Pattern[bytes] | None, timeout: float, start: int | None
) -> dict[str, Any] | None:
    """What was found. None: not within `timeout`. HolderGone, with its farewell as its argument, when it ended."""
    if matcher is not None or start is not None:
        read_from(channel, start)  # else only its end is of interest, which everyone connected is told
    seen, end = b"", start or 0
    for message in channel.follow(timeout):
        if isinstance(message, tuple):
            end = message[0] + len(message[1])
            if matcher is not None:
                seen = (seen + message[1])[-SEARCH_WINDOW - len(message[1]) :]
                found = match(matcher, seen, end - len(seen))
                if found:
                    return found
        elif message.get("event") in ("lost", "undone"):
            seen = b""  # nothing may match across a gap
        elif message.get("event") == "exit":
            raise HolderGone(message, end)
    return None


def match(matcher: re.Pattern[bytes], data: bytes, first: int) -> dict[str, Any] | None:
    """Looks at what a person would see: `^ok` is found behind a prompt's colours too. Else at the raw bytes."""
    plain = screen.Plain(data)
    found = matcher.search(plain.text)
    if found:
        return {"matched": found[0].decode("utf-8", "replace"), "seq": first + plain.raw_end(found.end())}
    found = matcher.search(data)
    return {"matched": found[0].decode("utf-8", "replace"), "seq": first + found.end()} if found else None


def compiled(pattern: str) -> re.Pattern[bytes]:
    try:
        return re.compile(pattern.encode(), re.MULTILINE)
    except re.error as error:
        raise Usage(f"not a regular expression: {pattern!r}: {error}", "Escape special characters with \\.") from error
