"""Send requests over a channel to one session's holder, local or through a relay: send, output, follow, wait."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cmdop_migrate.errors import Blocked, NotAdmitted, Usage
from cmdop_migrate.holder import protocol
from cmdop_migrate.session import screen
from cmdop_migrate.session.holder_client import ANSWER_TIMEOUT, Channel, HolderGone

MAX_REQUEST = protocol.MAX_PAYLOAD - (4 << 10)  # leaves room for what a relay adds
SEARCH_WINDOW = 64 << 10  # bytes: the longest match that spans several pieces of output


@dataclass(frozen=True)
class Output:
    """Hold the bytes [start, end) of the output; `lost` bytes before them are no longer kept."""

    data: bytes
    start: int
    end: int
    lost: int


def send(channel: Channel, name: str, data: bytes, actor: str, gate_timeout: float) -> dict[str, Any]:
    """Send one whole input. Return its journal number and where the output was. Raise HolderGone if the session ends
    before it answers; Blocked, NotAdmitted."""
    asks = 1 + data.count(b"\r") + data.count(b"\n")  # a gate may be asked about each line
    timeout = ANSWER_TIMEOUT + asks * gate_timeout
    request: dict[str, Any] = {"op": "send", "data": data.decode("latin-1"), "actor": actor}
    if len(protocol.control(request)) > MAX_REQUEST:
        hint = "Send it in pieces of at most 128 KiB."
        raise Blocked(f"session {name!r}: {len(data)} bytes are more than one request can hold; nothing was sent", hint)
    answer = channel.ask(**request, timeout=timeout)
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
    """Return the output that is kept now, from `start`. Raise HolderGone, Usage."""
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
                break  # what we have is contiguous; the next request from there reports the loss
            lost += message["bytes"]
            first = message["from"] + message["bytes"]
        if first + len(data) >= end:
            break
    del data[max(0, end - first) :]
    return Output(bytes(data), first, first + len(data), lost)


def _reader(start: int | None) -> dict[str, Any]:
    return {"op": "attach", "actor": "", "read_only": True, "from": start}


def first_of(first: int, end: int, start: int | None) -> int:
    """Return the first byte to read of [first, end), for a reader that wants to begin at `start`. Raise Usage."""
    if start is not None and start > end:
        raise Usage(f"no output has number {start} yet", f"Give a number from {first} to {end}.")
    return max(first, start) if start is not None else first


def read_from(channel: Channel, start: int | None) -> int:
    """Ask for output from `start`, or for all that is kept. Return the number of the first byte that will arrive."""
    answer = channel.ask(**_reader(start))
    return first_of(answer["start"], answer["end"], start)


def follow(channel: Channel, start: int | None) -> Iterator[Output | dict[str, Any]]:
    """Yield output as it arrives, and events; the exit event is the last. Raise HolderGone."""
    read_from(channel, start)
    for message in channel.follow():
        if isinstance(message, tuple):
            yield Output(message[1], message[0], message[0] + len(message[1]), 0)
        else:
            yield message


def wait(
    channel: Channel, matcher: re.Pattern[bytes] | None, timeout: float, start: int | None
) -> dict[str, Any] | None:
    """Return what was found; None: nothing within `timeout`. When the session ends, raise HolderGone with the exit
    event and the end of the output as its arguments."""
    if matcher is not None or start is not None:
        read_from(channel, start)  # otherwise only the exit event matters, which every client gets
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
    """Search what a person would see first: `^ok` is found after a coloured prompt too. Then search the raw bytes."""
    plain = screen.Plain(data)
    found = matcher.search(plain.text)
    if found:
        return {"matched": found[0].decode("utf-8", "replace"), "seq": first + plain.raw_end(found.end())}
    found = matcher.search(data)
    return {"matched": found[0].decode("utf-8", "replace"), "seq": first + found.end()} if found else None


def compiled(pattern: str) -> re.Pattern[bytes]:
    """Return the compiled pattern. Raise Usage."""
    try:
        return re.compile(pattern.encode(), re.MULTILINE)
    except re.error as error:
        raise Usage(f"not a regular expression: {pattern!r}: {error}", "Escape special characters with \\.") from error
