"""Look at sessions and talk to them: ls, show, send, output, wait, kill."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from cmdop_migrate.errors import Blocked, SessionExited, TimedOut, Usage
from cmdop_migrate.model import Record, State
from cmdop_migrate.session import cgroup, tree
from cmdop_migrate.session.channel import Channel, HolderGone, exited
from cmdop_migrate.session.records import Records
from cmdop_migrate.session.ring import Ring

T = TypeVar("T")
SEARCH_WINDOW = 64 << 10  # how far back a pattern may have begun


@dataclass(frozen=True)
class Output:
    data: bytes
    start: int
    end: int
    lost: int


def state_of(record: Record, frozen: bool) -> State:
    if record.phase == "live":
        return "frozen" if frozen else "running"
    return "restoring" if record.phase == "starting" else record.phase


def row(records: Records, record: Record) -> dict[str, Any]:
    """One line of `ls`. A holder that does not answer is said, not waited for."""
    status: dict[str, Any] = {}
    note = record.exit.reason if record.exit else ""
    if record.phase == "live":
        try:
            with Channel(records.socket(record.session)) as channel:
                status = channel.ask(op="status", timeout=1.0)
        except HolderGone:
            note = "its holder does not listen"
        except TimedOut:
            note = "its holder does not answer"
    group = records.cgroup(record.session)
    return {
        "session": record.session,
        "name": record.name,
        "host": record.host,
        "state": state_of(record, cgroup.is_frozen(group)),
        "token": record.token,
        "clients": status.get("clients", 0),
        "idle_s": round(status["idle"], 1) if "idle" in status else None,
        "rss": tree.rss(group),
        "pid": record.pid,
        "command": list(record.spec.command),
        "created": record.created,
        "note": note,
    }


def list_all(records: Records) -> list[dict[str, Any]]:
    return [row(records, record) for record in records.all() if record.phase != "starting"]


def show(records: Records, reference: str) -> dict[str, Any]:
    record = records.find(reference)
    group = records.cgroup(record.session)
    directory = records.directory(record.session)
    stores = [(point, directory / f"layers/{number}/upper") for number, point in enumerate(record.layers)]
    return {
        **row(records, record),
        "user": record.spec.user,
        "cwd": record.spec.cwd,
        "net": record.spec.net,
        "address": record.link.address if record.link else None,
        "shares": list(record.spec.shares),
        "parent": record.parent,
        "tree": [asdict(one) for one in tree.processes(group)],
        "sockets": [asdict(one) for one in tree.sockets(group)],
        "files": [asdict(one) for one in tree.changed_files(stores)],
        "lease": {"holder": record.host, "token": record.token},
        "checkpoint": record.checkpoint,
        "exit": asdict(record.exit) if record.exit else None,
        "output": _output_bounds(records, record),
    }


def open_channel(records: Records, reference: str) -> tuple[Record, Channel]:
    """A connection to a live session, or the error that says why there is none."""
    record = records.find(reference)
    if record.phase == "exited" and record.exit:
        raise exited(record.name, record.exit.reason)
    if record.phase != "live":
        raise Blocked(f"session {record.name!r} is {state_of(record, False)}", "See: cmdop-migrate ls")
    try:
        return record, Channel(records.socket(record.session))
    except HolderGone:
        records.sweep()
        after = records.load(record.session)
        reason = after.exit.reason if after and after.exit else "its holder does not listen"
        raise exited(record.name, reason) from None


def send(records: Records, reference: str, data: bytes, actor: str) -> dict[str, Any]:
    record, channel = open_channel(records, reference)
    with channel:
        try:
            answer = channel.ask(op="send", data=data.decode("latin-1"), actor=actor)
        except HolderGone:
            raise exited(record.name, "it ended before the input arrived") from None
    if answer.get("error") == "full":
        hint = "It does not read its input. Look at it with: cmdop-migrate attach " + record.name
        raise Blocked(f"session {record.name!r} has too much unread input; nothing was sent", hint)
    return {"seq": answer["seq"], "at": answer["at"]}


def output(records: Records, reference: str, start: int | None) -> Output:
    """What is kept of the output, from `start`; of a session that ended too."""
    record = records.find(reference)
    if record.phase == "live":
        try:
            return _live_output(records, record, start)
        except HolderGone:
            records.sweep()
    ring = _saved_ring(records, record)
    begin = _begin(ring.start, ring.end, start)
    return Output(ring.read(begin, ring.end - begin), begin, ring.end, begin - (begin if start is None else start))


def _live_output(records: Records, record: Record, start: int | None) -> Output:
    with Channel(records.socket(record.session)) as channel:
        bounds = channel.ask(op="status")
        begin = _begin(bounds["start"], bounds["end"], start)
        channel.ask(**_reader(begin))
        end: int = bounds["end"]
        data, lost, first = bytearray(), begin - (begin if start is None else start), begin
        if begin >= end:
            return Output(b"", begin, end, lost)
        for message in channel.follow():
            if isinstance(message, tuple):
                data += message[1]
            elif message.get("event") == "lost":
                lost += message["bytes"]
                first = message["from"] + message["bytes"]
                end = max(end, first)
            if first + len(data) >= end:
                break
        return Output(bytes(data[: end - first]), first, end, lost)


def _reader(start: int | None) -> dict[str, Any]:
    return {"op": "attach", "actor": "", "read_only": True, "from": start}


def _begin(first: int, end: int, start: int | None) -> int:
    if start is not None and start > end:
        raise Usage(f"no output has number {start} yet", f"Give a number from {first} to {end}.")
    return max(first, start) if start is not None else first


def follow(records: Records, reference: str, start: int | None) -> Iterator[Output | dict[str, Any]]:
    """Pieces of output as they come; the exit event is the last."""
    record, channel = open_channel(records, reference)
    with channel:
        channel.ask(**_reader(start))
        try:
            for message in channel.follow():
                if isinstance(message, tuple):
                    yield Output(message[1], message[0], message[0] + len(message[1]), 0)
                else:
                    yield message
        except HolderGone:
            records.sweep()
            yield {"event": "exit", **(_exit_of(records, record.session) or {"code": None, "reason": "holder gone"})}


def wait(
    records: Records, reference: str, pattern: str | None, timeout: float, start: int | None = None
) -> dict[str, Any]:
    """Until it prints `pattern` (from `start`, or anywhere in what is kept), or exits."""
    matcher = _compiled(pattern) if pattern is not None else None
    record = records.find(reference)
    if record.phase == "exited":
        return _ended(records, record, matcher, start)
    record, channel = open_channel(records, reference)
    with channel:
        channel.ask(**_reader(start))
        seen, end = b"", 0
        try:
            for message in channel.follow(timeout):
                if isinstance(message, tuple):
                    seen = (seen + message[1])[-SEARCH_WINDOW - len(message[1]) :]
                    end = message[0] + len(message[1])
                    found = matcher.search(seen) if matcher else None
                    if found:
                        return {"matched": found[0].decode("utf-8", "replace"), "seq": end - len(seen) + found.end()}
                elif message.get("event") == "exit":
                    return {"exited": message["code"], "reason": message["reason"], "seq": end}
        except HolderGone:
            records.sweep()
            after = records.load(record.session)
            return _ended(records, after or record, None, None)
    what = f"did not print {pattern!r}" if pattern is not None else "did not exit"
    raise TimedOut(f"session {record.name!r} {what} within {timeout:g} s", "It goes on; give --timeout more.")


def _ended(records: Records, record: Record, matcher: re.Pattern[bytes] | None, start: int | None) -> dict[str, Any]:
    ring = _saved_ring(records, record)
    begin = max(ring.start, min(start if start is not None else ring.start, ring.end))
    found = matcher.search(ring.read(begin, ring.end - begin)) if matcher else None
    if found:
        return {"matched": found[0].decode("utf-8", "replace"), "seq": begin + found.end()}
    code, reason = (record.exit.code, record.exit.reason) if record.exit else (None, "unknown")
    if matcher:
        raise exited(record.name, f"{reason}, and never printed that")
    return {"exited": code, "reason": reason, "seq": ring.end}


def _compiled(pattern: str) -> re.Pattern[bytes]:
    try:
        return re.compile(pattern.encode(), re.MULTILINE)
    except re.error as error:
        raise Usage(f"not a regular expression: {pattern!r}: {error}", "Escape special characters with \\.") from error


def kill(records: Records, reference: str, number: signal.Signals, grace: float) -> dict[str, Any]:
    """Ends a session, or forgets one that has ended already."""
    record = records.find(reference)
    if record.phase == "exited":
        records.forget(record.session)
        return {"session": record.session, "exit": record.exit.code if record.exit else None, "removed": True}
    try:
        record, channel = open_channel(records, reference)
    except SessionExited:
        return {"session": record.session, "exit": (_exit_of(records, record.session) or {}).get("code")}
    with channel:
        try:
            channel.ask(op="kill", signal=int(number), grace=grace)
        except HolderGone:
            pass
        except TimedOut:
            _kill_without_holder(records, record)
    ended = _until(lambda: records.load(record.session), lambda one: one is None or one.phase == "exited", grace + 10)
    if ended is None or ended.exit is None:
        records.sweep()
    else:
        _until(lambda: records.is_held(record.session), lambda held: not held, 5.0)
    result = _exit_of(records, record.session) or {}
    records.events.emit("killed", record.session, name=record.name, signal=number.name, **result)
    return {"session": record.session, "exit": result.get("code"), "reason": result.get("reason")}


def _kill_without_holder(records: Records, record: Record) -> None:
    """The holder is stopped or stuck: the session's processes go first, so that nothing runs unkept, then it."""
    group = records.cgroup(record.session)
    cgroup.kill(group)
    for pid in cgroup.pids(f"{group.rpartition('/')[0]}/holders"):
        if _holds(pid, str(records.directory(record.session) / "holder.lock")):
            os.kill(pid, signal.SIGKILL)


def _holds(pid: int, path: str) -> bool:
    try:
        return any(os.readlink(f"/proc/{pid}/fd/{fd}") == path for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _until(read: Callable[[], T], done: Callable[[T], bool], seconds: float) -> T:
    until = time.monotonic() + seconds
    while True:
        value = read()
        if done(value) or time.monotonic() > until:
            return value
        time.sleep(0.02)


def _saved_ring(records: Records, record: Record) -> Ring:
    try:
        saved = (records.directory(record.session) / "output.ring").read_bytes()
        return Ring.load(saved, records.config.ring_size)
    except (FileNotFoundError, ValueError):
        return Ring(records.config.ring_size)


def _output_bounds(records: Records, record: Record) -> dict[str, int]:
    if record.phase == "live":
        try:
            with Channel(records.socket(record.session)) as channel:
                status = channel.ask(op="status", timeout=1.0)
                return {"start": status["start"], "end": status["end"]}
        except (HolderGone, TimedOut):
            pass
    ring = _saved_ring(records, record)
    return {"start": ring.start, "end": ring.end}


def _exit_of(records: Records, session: str) -> dict[str, Any] | None:
    record = records.load(session)
    return asdict(record.exit) if record and record.exit else None


def journal(records: Records, record: Record) -> Iterator[dict[str, Any]]:
    """The inputs that were committed, in order."""
    path = records.directory(record.session) / "inputs.jsonl"
    if path.exists():
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    yield json.loads(line)
                except ValueError:
                    continue
