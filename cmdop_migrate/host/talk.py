"""Talk to the sessions of this host: open a channel to a holder, send input, read and follow output, wait.

Also decide what a session that no longer runs here is: ended, parked or being moved, and which error says so.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar, cast

from cmdop_migrate.errors import Blocked, CmdopError, SessionExited, TimedOut, Unreachable
from cmdop_migrate.holder.output_ring import Ring
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Exit, Record, State
from cmdop_migrate.session import requests
from cmdop_migrate.session.holder_client import Channel, HolderGone, exited
from cmdop_migrate.session.requests import Output

T = TypeVar("T")
LOSS_TIMEOUT = 3.0  # seconds until the record of a session whose holder hung up must say how it ended
KILL_TIMEOUT = 5.0  # seconds for a holder to answer a kill; after that it hangs, and is killed with its session
STATUS_TIMEOUT = 1.0  # seconds for a holder to answer a request for its status
UNTIL_EVERY = 0.02  # seconds between two calls of `until`


def state_of(record: Record, status: Mapping[str, Any], frozen: bool = False) -> State:
    """Return the state of a session as `ls` shows it. `status` is its holder's answer, empty if it has no holder."""
    if record.phase == "live":
        for state, holds in (
            ("fenced", status.get("fenced")),
            ("checkpointing", status.get("busy") == "checkpointing"),
            ("frozen", frozen),
        ):
            if holds:
                return cast(State, state)
        return "running"
    if record.phase == "handing":
        return "frozen"
    return "restoring" if record.phase == "starting" else record.phase


def printed_at(this_host: Host, session: str) -> float | None:
    """Return when the session printed for the first time since it was restored, on this host's CLOCK_BOOTTIME; None if
    it has not yet, or its holder does not answer."""
    try:
        with Channel(this_host.socket(session)) as channel:
            first = channel.ask(op="status", timeout=STATUS_TIMEOUT).get("first_output")
    except (HolderGone, CmdopError):
        return None  # it has ended already, or its holder is busy
    return round(float(first), 6) if first is not None else None


def open_channel(this_host: Host, reference: str) -> tuple[Record, Channel]:
    """Connect to the holder of a live session. Raise the error that says why it cannot be reached."""
    record = this_host.find(reference)
    if record.phase == "exited" and record.exit:
        raise exited(record.name, record.exit)
    if record.phase in ("handing", "parked"):
        raise over(record)
    if record.phase != "live":
        raise Blocked(f"session {record.name!r} is {state_of(record, {})}", "See: cmdop-migrate ls")
    try:
        return record, Channel(this_host.socket(record.session))
    except HolderGone:
        raise over(after_loss(this_host, record)) from None


def after_loss(this_host: Host, record: Record) -> Record:
    """Return the record of a session whose holder hung up: the session ended, or the holder died.

    The kernel may take a moment to release a dead holder's lock. Raise Unreachable if the session keeps running and its
    holder only refused this connection.
    """

    def read() -> Record:
        this_host.sweep()
        return this_host.load(record.session) or replace(record, phase="exited")

    after = until(read, lambda now: now.phase != "live", LOSS_TIMEOUT)
    if after.phase == "live":
        hint = "It keeps running. It may have too many clients; try again, or see: cmdop-migrate show " + record.name
        raise Unreachable(f"the holder of session {record.name!r} closed the connection", hint)
    return after


def died(this_host: Host, record: Record) -> bool:
    """Tell whether a session whose holder hung up died with its holder: it neither ended by itself nor was killed."""
    after = after_loss(this_host, record)
    return after.phase == "exited" and after.exit is not None and after.exit.code is None


def over(record: Record) -> CmdopError:
    """Return the error for a session that no longer runs here, with the next command."""
    if record.phase == "handing":
        return Blocked(
            f"session {record.name!r} is being moved to another host",
            "If the migration was interrupted: cmdop-migrate resume",
        )
    if record.phase == "parked":
        return Blocked(
            f"session {record.name!r} is parked in the store", f"Restore it with: cmdop-migrate restore {record.name}"
        )
    return exited(record.name, record.exit)


def send(this_host: Host, reference: str, data: bytes, actor: str) -> dict[str, Any]:
    """Type `data` into a session on behalf of `actor`. Return the holder's answer."""
    record, channel = open_channel(this_host, reference)
    with channel:
        try:
            return requests.send(channel, record.name, data, actor, this_host.config.gate_timeout)
        except HolderGone:
            raise over(after_loss(this_host, record)) from None


def output(this_host: Host, reference: str, start: int | None) -> Output:
    """Return the kept output from byte `start`, also of a session that has ended."""
    record = this_host.find(reference)
    if record.phase == "live":
        try:
            with Channel(this_host.socket(record.session)) as channel:
                return requests.output(channel, start)
        except HolderGone:
            record = after_loss(this_host, record)
    ring = _kept_ring(this_host, record)
    begin = requests.first_of(ring.start, ring.end, start)
    return Output(ring.read(begin, ring.end - begin), begin, ring.end, begin - (begin if start is None else start))


def follow(this_host: Host, reference: str, start: int | None) -> Iterator[Output | dict[str, Any]]:
    """Yield output as it is printed, then the exit event. What a slow reader had not received when the session ended
    is read from the output that was kept."""
    record = this_host.find(reference)
    seen = start
    if record.phase == "live":
        try:
            with Channel(this_host.socket(record.session)) as channel:
                for message in requests.follow(channel, start):
                    if isinstance(message, Output):
                        seen = message.end
                        yield message
                    elif message.get("event") == "lost":
                        seen = message["from"] + message["bytes"]
                        yield message
        except HolderGone:
            pass
        record = after_loss(this_host, record)
    yield from _rest(this_host, record, seen)


def _rest(this_host: Host, record: Record, seen: int | None) -> Iterator[Output | dict[str, Any]]:
    ring = _saved_ring(this_host, record)
    if ring is not None:
        begin = requests.first_of(ring.start, ring.end, seen)
        if seen is not None and begin > seen:
            yield {"event": "lost", "bytes": begin - seen, "from": seen}
        if begin < ring.end:
            yield Output(ring.read(begin, ring.end - begin), begin, ring.end, 0)
    ended = asdict(record.exit) if record.exit else {"code": None, "reason": record.phase}
    yield {"event": "exit", **ended}


def wait(
    this_host: Host, reference: str, pattern: str | None, timeout: float, start: int | None = None
) -> dict[str, Any]:
    """Wait until the session prints `pattern` (from byte `start`, or anywhere in the kept output), or exits. Raise
    TimedOut after `timeout` seconds."""
    matcher = requests.compiled(pattern) if pattern is not None else None
    record = this_host.find(reference)
    if record.phase == "exited":
        return _ended(this_host, record, matcher, start)
    try:
        record, channel = open_channel(this_host, reference)
        with channel:
            answer = requests.wait(channel, matcher, timeout, start)
            if answer:
                return answer
    except (HolderGone, SessionExited):
        return _ended(this_host, after_loss(this_host, record), matcher, start)
    what = f"did not print {pattern!r}" if pattern is not None else "did not exit"
    raise TimedOut(f"session {record.name!r} {what} within {timeout:g} s", "It keeps running; give a longer --timeout.")


def _ended(this_host: Host, record: Record, matcher: re.Pattern[bytes] | None, start: int | None) -> dict[str, Any]:
    ring = _saved_ring(this_host, record) or Ring(this_host.config.ring_size)
    begin = max(ring.start, min(start if start is not None else ring.start, ring.end))
    match = requests.match(matcher, ring.read(begin, ring.end - begin), begin) if matcher else None
    if match:
        return match
    code, reason = (record.exit.code, record.exit.reason) if record.exit else (None, record.phase)
    return {"exited": code, "reason": reason, "seq": ring.end}


def _saved_ring(this_host: Host, record: Record) -> Ring | None:
    try:
        saved = (this_host.directory(record.session) / "output.ring").read_bytes()
        return Ring.load(saved, max(this_host.config.ring_size, len(saved)))
    except (FileNotFoundError, ValueError):
        return None


def _kept_ring(this_host: Host, record: Record) -> Ring:
    """Return the kept output of an ended session. Raise SessionExited if it was lost with the holder."""
    ring = _saved_ring(this_host, record)
    if ring is None:
        reason = record.exit.reason if record.exit else record.phase
        raise SessionExited(
            f"session {record.name!r} has ended: {reason}; its output is lost", "See: cmdop-migrate events"
        )
    return ring


def output_bounds(this_host: Host, record: Record) -> dict[str, Any]:
    """Return the first and the last byte of the output that is kept, as `show` reports them."""
    if record.phase == "live":
        try:
            with Channel(this_host.socket(record.session)) as channel:
                status = channel.ask(op="status", timeout=STATUS_TIMEOUT)
                return {"start": status["start"], "end": status["end"], "first_at": status.get("first_output")}
        except (HolderGone, TimedOut):
            pass
    ring = _saved_ring(this_host, record)
    return {"start": ring.start, "end": ring.end} if ring else {"start": 0, "end": 0}


def exit_of(this_host: Host, session: str) -> Exit | None:
    """Return how the session ended, or None if that is not on record."""
    record = this_host.load(session)
    return record.exit if record else None


def until(read: Callable[[], T], done: Callable[[T], bool], seconds: float) -> T:
    """Call `read` until its value is `done`, for at most `seconds`. Return the last value."""
    end = time.monotonic() + seconds
    while True:
        value = read()
        if done(value) or time.monotonic() > end:
            return value
        time.sleep(UNTIL_EVERY)
