"""Use sessions through a relay: list, attach, send, output, follow, wait, turn. Needs a credential, and not root.

Each function makes one connection to the relay, which resolves the session's name and then carries its channel.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmdop_migrate.errors import NotAdmitted, SessionExited, SessionNotFound, TimedOut, Usage
from cmdop_migrate.gateway.relay_channel import RelayStream
from cmdop_migrate.host import turn as host_turn
from cmdop_migrate.relay import credentials
from cmdop_migrate.relay.credentials import Credential
from cmdop_migrate.session import attach as session_attach
from cmdop_migrate.session import requests
from cmdop_migrate.session.holder_client import Channel, HolderGone
from cmdop_migrate.session.requests import Output

_ID = re.compile(r"[0-9a-f]{24}")
NEW_RELAY = 2.0  # seconds in which the hosts of a relay that has just been started connect to it
RELIST_EVERY = 0.3
GATE_TIMEOUT = 5.0  # the hosts' default
_UNREACHABLE = {
    "moving": "it is being moved",
    "parked": "it is parked in the store",
    "waiting": "no host has it at the moment",
    "away": "the relay does not answer",
}


@dataclass(frozen=True)
class RelayAccess:
    """Represent the address of a relay, and the credential to use there."""

    url: str
    credential: Credential


@dataclass(frozen=True)
class SessionRef:
    """Represent the id and the name of a session at a relay."""

    session: str
    name: str


def load(file: Path) -> Credential:
    """Return the credential in a file. Raise NotAdmitted if it is missing or invalid."""
    try:
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text file"
        raise NotAdmitted(
            f"no credential: {file}: {why}",
            "Give --credential FILE, or set CMDOP_MIGRATE_RELAY_CREDENTIAL; on a host: relay token create",
        ) from error
    return credentials.parse(text)


def access(url: str | None, credential: Credential) -> RelayAccess:
    """Return how to use the relay at `url`, or at the address in the credential if `url` is None.

    Raise NotAdmitted for a host's credential, Usage if neither names a relay.
    """
    if credential.claims.kind != "client":
        raise NotAdmitted(
            "this is a host's credential", "Make one for yourself: relay token create --actor NAME --role execute"
        )
    url = url or credential.relay
    if url is None:
        raise Usage("which relay?", "Give --relay wss://…, or set CMDOP_MIGRATE_RELAY.")
    return RelayAccess(url, credential)


def list_all(where: RelayAccess) -> list[dict[str, Any]]:
    """Return the relay's rows of all sessions that the credential covers, by name. Raise NotAdmitted, Unreachable."""
    with RelayStream(where.url, where.credential) as stream:
        return _rows(stream)


def _rows(stream: RelayStream) -> list[dict[str, Any]]:
    return sorted(stream.sessions(), key=lambda row: str(row.get("name")))


def _find(stream: RelayStream, reference: str) -> SessionRef:
    """Resolve a name, an id or a unique prefix of an id, among the sessions that the credential covers.

    Raise SessionNotFound, or Usage if the reference is ambiguous.
    """
    if _ID.fullmatch(reference):
        return SessionRef(reference, reference[:12])
    rows = _rows(stream)
    until = time.monotonic() + NEW_RELAY
    while not rows and time.monotonic() < until:  # the relay may have just been started: its hosts reconnect
        time.sleep(RELIST_EVERY)
        rows = _rows(stream)
    by_name = [row for row in rows if row["name"] == reference]
    by_name = [row for row in by_name if row["state"] != "exited"] or by_name
    by_id = [row for row in rows if reference and str(row["session"]).startswith(reference)]
    matching = by_name or by_id
    if len(matching) > 1:
        some = ", ".join(f"{row['session'][:12]} ({row['name']})" for row in matching[:5])
        raise Usage(f"{reference!r} is the name of several sessions: {some}", "Give the id.")
    if not matching:
        known = ", ".join(str(row["name"]) for row in rows[:20]) or "none"
        raise SessionNotFound(
            f"no session {reference!r} at the relay for this credential", f"There: {known}. See: ls --relay"
        )
    return SessionRef(str(matching[0]["session"]), str(matching[0]["name"]))


@contextlib.contextmanager
def connected(where: RelayAccess, reference: str) -> Iterator[tuple[SessionRef, Channel]]:
    """Yield a session and a channel to it. Replace HolderGone without an exit event, and a timeout, by the reason why
    the session could not be reached."""
    with RelayStream(where.url, where.credential) as stream:
        ref = _find(stream, reference)
        try:
            yield ref, stream.open(ref.session)
        except HolderGone as error:
            if error.args:
                raise
            raise stream.failure or SessionExited(f"session {ref.name!r} has ended", "See: ls --relay") from None
        except TimedOut as error:
            why = _UNREACHABLE.get(stream.status or "")
            if why is None:
                raise
            raise TimedOut(f"session {ref.name!r} did not answer in time: {why}", error.hint) from error


def attach(
    where: RelayAccess, reference: str, read_only: bool, start: int | None, keyboard: int, display: int
) -> tuple[SessionRef, session_attach.Outcome]:
    """Connect a terminal to a session until it is detached or the session ends."""
    read_only = read_only or where.credential.claims.role == "read"
    with connected(where, reference) as (ref, channel):
        actor = where.credential.claims.name
        outcome = session_attach.attach(channel, actor, read_only, start, keyboard, display)
        if outcome.kind == "lost":
            raise HolderGone
        return ref, outcome


def send(where: RelayAccess, reference: str, data: bytes) -> dict[str, Any]:
    """Send one input, whole and once. Raise TimedOut if it is not known to have arrived."""
    with connected(where, reference) as (ref, channel):
        try:
            return requests.send(channel, ref.name, data, where.credential.claims.name, GATE_TIMEOUT)
        except TimedOut as error:
            raise TimedOut(
                error.message, "The session may have got it, or get it yet: look at its output before you repeat it."
            ) from error


def output(where: RelayAccess, reference: str, start: int | None) -> Output:
    """Return the output that is kept, from byte `start`."""
    with connected(where, reference) as (_, channel):
        return requests.output(channel, start)


def follow(where: RelayAccess, reference: str, start: int | None) -> Iterator[Output | dict[str, Any]]:
    """Yield output and events as they arrive."""
    with connected(where, reference) as (_, channel):
        yield from requests.follow(channel, start)


def wait(where: RelayAccess, reference: str, pattern: str | None, timeout: float, start: int | None) -> dict[str, Any]:
    """Wait for output that matches `pattern`, or for the session's end. Raise TimedOut."""
    matcher = requests.compiled(pattern) if pattern is not None else None
    try:
        with connected(where, reference) as (ref, channel):
            result = requests.wait(channel, matcher, timeout, start)
            if result is not None:
                return result
            what = f"did not print {pattern!r}" if pattern is not None else "did not exit"
            hint = "The session keeps running; give --timeout more."
            raise TimedOut(f"session {ref.name!r} {what} within {timeout:g} s", hint)
    except HolderGone as error:
        exit_event, end = error.args
        return {"exited": exit_event.get("code"), "reason": exit_event.get("reason"), "seq": end}


def turn(where: RelayAccess, reference: str, asked: host_turn.TurnOptions) -> dict[str, Any]:
    """Request, grant, release, seize or show the write turn."""
    with connected(where, reference) as (ref, channel):
        return host_turn.over(channel, ref.session, ref.name, asked)
