"""Look at sessions and talk to them: ls, show, send, output, wait, kill."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar, cast

from cmdop_migrate.errors import Blocked, CmdopError, SessionExited, TimedOut, Unreachable
from cmdop_migrate.holder import cgroup
from cmdop_migrate.holder.output_ring import Ring
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Record, State
from cmdop_migrate.session import inspect, open_files, requests
from cmdop_migrate.session.holder_client import Channel, HolderGone, exited
from cmdop_migrate.session.requests import Output

T = TypeVar("T")
LOSS_TIMEOUT = 3.0
KILL_TIMEOUT = 5.0  # then the holder is stuck, and is not needed for it
MOVING = "on its way to another host; what became of it: cmdop-migrate resume"


def state_of(record: Record, status: Mapping[str, Any], frozen: bool = False) -> State:
    """What a person is told; `status` is its holder's word, empty when there is none."""
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


def row(this_host: Host, record: Record) -> dict[str, Any]:
    """One line of `ls`. A holder that does not answer is said, not waited for."""
    status: dict[str, Any] = {}
    note = record.exit.reason if record.exit else MOVING if record.phase == "handing" else ""
    if record.phase == "live":
        try:
            with Channel(this_host.socket(record.session)) as channel:
                status = channel.ask(op="status", timeout=1.0)
        except HolderGone:
            note = "its holder does not listen"
        except TimedOut:
            note = "its holder does not answer"
    if status.get("busy") == "restoring":
        note = _stall(this_host, record) or "its memory is still coming"
    turn = status.get("turn") or {}
    if turn.get("frozen") and not note:
        note = f"seized by {turn['holder']}"
    group = this_host.cgroup(record.session)
    return {
        "session": record.session,
        "name": record.name,
        "host": record.host,
        "state": state_of(record, status, cgroup.is_frozen(group)),
        "token": record.token,
        "clients": status.get("clients", 0),
        "idle_s": round(status["idle"], 1) if "idle" in status else None,
        "rss": inspect.rss(group),
        "pid": record.pid,
        "command": list(record.spec.command),
        "created": record.created,
        "note": note,
        "turn": turn.get("holder"),
    }


def printed_at(this_host: Host, session: str) -> float | None:
    """When it printed for the first time since it is back, on this host's CLOCK_BOOTTIME; None: not yet."""
    try:
        with Channel(this_host.socket(session)) as channel:
            first = channel.ask(op="status", timeout=1.0).get("first_output")
    except (HolderGone, CmdopError):
        return None  # it has ended already, or its holder is busy
    return round(float(first), 6) if first is not None else None


def _stall(this_host: Host, record: Record) -> str:
    """What a session that runs while its memory is still in the store waits for."""
    try:
        return (this_host.directory(record.session) / "image" / "stall").read_text()
    except OSError:
        return ""


def list_all(this_host: Host) -> list[dict[str, Any]]:
    return [row(this_host, record) for record in this_host.all() if record.phase != "starting"]


def show(this_host: Host, reference: str) -> dict[str, Any]:
    record = this_host.find(reference)
    group = this_host.cgroup(record.session)
    directory = this_host.directory(record.session)
    stores = [(point, directory / f"layers/{number}/upper") for number, point in enumerate(record.layers)]
    return {
        **row(this_host, record),
        "user": record.spec.user,
        "cwd": record.spec.cwd,
        "net": record.spec.net,
        "address": record.link.address if record.link else None,
        "shares": list(record.spec.shares),
        "hooks": [{"event": event, "path": path} for event, path in record.spec.hooks],
        "gate": record.spec.gate or this_host.config.gate,
        "parent": record.parent,
        "tree": [asdict(one) for one in inspect.processes(group)],
        "sockets": [asdict(one) for one in inspect.sockets(group)],
        "open_files": [asdict(one) for one in open_files.opened(group)],
        "files": [asdict(one) for one in inspect.changed_files(stores)],
        "lease": {"holder": record.host, "token": record.token},
        "checkpoint": record.checkpoint,
        "exit": asdict(record.exit) if record.exit else None,
        "output": _output_bounds(this_host, record),
    }


def open_channel(this_host: Host, reference: str) -> tuple[Record, Channel]:
    """A connection to a live session, or the error that says why there is none."""
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
    """The record of a session whose holder hung up: it ended, or the holder died. The kernel may take a moment to
    let go of a dead holder's lock. Unreachable when it lives on and just does not talk to us."""

    def read() -> Record:
        this_host.sweep()
        return this_host.load(record.session) or replace(record, phase="exited")

    after = until(read, lambda one: one.phase != "live", LOSS_TIMEOUT)
    if after.phase == "live":
        hint = "It runs on. It may have too many clients; try again, or see: cmdop-migrate show " + record.name
        raise Unreachable(f"the holder of session {record.name!r} closed the connection", hint)
    return after


def died(this_host: Host, record: Record) -> bool:
    """Whether a session whose holder hung up went down with it: neither by itself nor by anybody's wish."""
    after = after_loss(this_host, record)
    return after.phase == "exited" and after.exit is not None and after.exit.code is None


def over(record: Record) -> CmdopError:
    """What to say of a session that is no longer live."""
    if record.phase == "handing":
        return Blocked(
            f"session {record.name!r} is being moved to another host", "If that was cut off: cmdop-migrate resume"
        )
    if record.phase == "parked":
        return Blocked(
            f"session {record.name!r} is parked in the store",
            f"Bring it back with: cmdop-migrate restore {record.name}",
        )
    return exited(record.name, record.exit)


def send(this_host: Host, reference: str, data: bytes, actor: str) -> dict[str, Any]:
    record, channel = open_channel(this_host, reference)
    with channel:
        try:
            return requests.send(channel, record.name, data, actor, this_host.config.gate_timeout)
        except HolderGone:
            raise over(after_loss(this_host, record)) from None


def output(this_host: Host, reference: str, start: int | None) -> Output:
    """What is kept of the output, from `start`; of a session that ended too."""
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
    """Pieces of output as they come; the exit event is the last. What a slow reader had not got when the session
    ended comes from what was kept."""
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
    """Until it prints `pattern` (from `start`, or anywhere in what is kept), or exits."""
    matcher = requests.compiled(pattern) if pattern is not None else None
    record = this_host.find(reference)
    if record.phase == "exited":
        return _ended(this_host, record, matcher, start)
    try:
        record, channel = open_channel(this_host, reference)
        with channel:
            found = requests.wait(channel, matcher, timeout, start)
            if found:
                return found
    except (HolderGone, SessionExited):
        return _ended(this_host, after_loss(this_host, record), matcher, start)
    what = f"did not print {pattern!r}" if pattern is not None else "did not exit"
    raise TimedOut(f"session {record.name!r} {what} within {timeout:g} s", "It goes on; give --timeout more.")


def _ended(this_host: Host, record: Record, matcher: re.Pattern[bytes] | None, start: int | None) -> dict[str, Any]:
    ring = _saved_ring(this_host, record) or Ring(this_host.config.ring_size)
    begin = max(ring.start, min(start if start is not None else ring.start, ring.end))
    found = requests.match(matcher, ring.read(begin, ring.end - begin), begin) if matcher else None
    if found:
        return found
    code, reason = (record.exit.code, record.exit.reason) if record.exit else (None, record.phase)
    return {"exited": code, "reason": reason, "seq": ring.end}


def _saved_ring(this_host: Host, record: Record) -> Ring | None:
    try:
        saved = (this_host.directory(record.session) / "output.ring").read_bytes()
        return Ring.load(saved, max(this_host.config.ring_size, len(saved)))
    except (FileNotFoundError, ValueError):
        return None


def _kept_ring(this_host: Host, record: Record) -> Ring:
    """SessionExited when the output went down with the holder that kept it."""
    ring = _saved_ring(this_host, record)
    if ring is None:
        reason = record.exit.reason if record.exit else record.phase
        raise SessionExited(f"session {record.name!r} is over: {reason}; what it printed is lost", "See: events")
    return ring


def _output_bounds(this_host: Host, record: Record) -> dict[str, Any]:
    if record.phase == "live":
        try:
            with Channel(this_host.socket(record.session)) as channel:
                status = channel.ask(op="status", timeout=1.0)
                return {"start": status["start"], "end": status["end"], "first_at": status.get("first_output")}
        except (HolderGone, TimedOut):
            pass
    ring = _saved_ring(this_host, record)
    return {"start": ring.start, "end": ring.end} if ring else {"start": 0, "end": 0}


def exit_of(this_host: Host, session: str) -> dict[str, Any] | None:
    record = this_host.load(session)
    return asdict(record.exit) if record and record.exit else None


def until(read: Callable[[], T], done: Callable[[T], bool], seconds: float) -> T:
    """The first value of `read` that is `done`, or the last one when the time is over."""
    end = time.monotonic() + seconds
    while True:
        value = read()
        if done(value) or time.monotonic() > end:
            return value
        time.sleep(0.02)
