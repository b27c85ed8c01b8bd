"""Sessions through a relay, by who they are: ls, attach, send, output, wait. Takes a credential, and not root."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmdop_migrate.errors import NotAdmitted, SessionExited, SessionNotFound, TimedOut, Usage
from cmdop_migrate.gateway import relay_channel
from cmdop_migrate.host import turn as host_turn
from cmdop_migrate.relay import credentials
from cmdop_migrate.relay.credentials import Credential
from cmdop_migrate.session import attach as session_attach
from cmdop_migrate.session import requests
from cmdop_migrate.session.holder_client import Channel, HolderGone
from cmdop_migrate.session.requests import Output

_ID = re.compile(r"[0-9a-f]{24}")
NEW_RELAY = 2.0
GATE_TIMEOUT = 5.0  # as hosts have it, unless they are told otherwise
_WORDS = {
    "moving": "it is being moved",
    "parked": "it is parked in the store",
    "waiting": "no host has it just now",
    "away": "the relay does not answer",
}


@dataclass(frozen=True)
class Place:
    """A relay, and as whom to come to it."""

    url: str
    credential: Credential


@dataclass(frozen=True)
class Found:
    session: str
    name: str


def load(file: Path) -> Credential:
    """NotAdmitted when there is none, or none that can be used."""
    try:
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "it is no text"
        raise NotAdmitted(
            f"no credential: {file}: {words}",
            "Give --credential FILE, or set CMDOP_MIGRATE_RELAY_CREDENTIAL; on a host: relay token create",
        ) from error
    return credentials.parse(text)


def place(url: str | None, credential: Credential) -> Place:
    """`url` wins over what the credential says."""
    if credential.claims.kind != "client":
        raise NotAdmitted(
            "this is a host's credential", "Make one for yourself: relay token create --actor NAME --role execute"
        )
    url = url or credential.relay
    if url is None:
        raise Usage("which relay?", "Give --relay wss://…, or set CMDOP_MIGRATE_RELAY.")
    return Place(url, credential)


def list_all(where: Place) -> list[dict[str, Any]]:
    return sorted(asyncio.run(relay_channel.listing(where.url, where.credential)), key=lambda row: str(row.get("name")))


def find(where: Place, reference: str) -> Found:
    """By name, id, or unique prefix of the id, among those that the credential is for."""
    if _ID.fullmatch(reference):
        return Found(reference, reference[:12])
    rows = list_all(where)
    until = time.monotonic() + NEW_RELAY
    while not rows and time.monotonic() < until:  # it may have just been started: its hosts are on their way back
        time.sleep(0.3)
        rows = list_all(where)
    by_name = [row for row in rows if row["name"] == reference]
    by_name = [row for row in by_name if row["state"] != "exited"] or by_name
    by_id = [row for row in rows if reference and str(row["session"]).startswith(reference)]
    found = by_name or by_id
    if len(found) > 1:
        some = ", ".join(f"{row['session'][:12]} ({row['name']})" for row in found[:5])
        raise Usage(f"{reference!r} is the name of several sessions: {some}", "Give the id.")
    if not found:
        known = ", ".join(str(row["name"]) for row in rows[:20]) or "none"
        raise SessionNotFound(
            f"no session {reference!r} at the relay for this credential", f"There: {known}. See: ls --relay"
        )
    return Found(str(found[0]["session"]), str(found[0]["name"]))


@contextlib.contextmanager
def _talking(where: Place, reference: str) -> Iterator[tuple[Found, Channel]]:
    """What goes wrong with the way there is said as such. HolderGone after a farewell is the session's own end."""
    found = find(where, reference)
    with relay_channel.Line(where.url, where.credential, found.session) as opened:
        try:
            yield found, opened.channel
        except HolderGone as error:
            if error.args:
                raise
            opened.settle()
            raise opened.why or SessionExited(f"session {found.name!r} has ended", "See: ls --relay") from None
        except TimedOut as error:
            standing = opened.bridge.standing or {}
            words = _WORDS.get(str(standing.get("event")))
            if words is None:
                raise
            raise TimedOut(f"session {found.name!r} did not answer in time: {words}", error.hint) from error


def attach(
    where: Place, reference: str, read_only: bool, start: int | None, keyboard: int, display: int
) -> tuple[Found, session_attach.Outcome]:
    read_only = read_only or where.credential.claims.role == "read"
    with _talking(where, reference) as (found, channel):
        actor = where.credential.claims.name
        outcome = session_attach.attach(channel, actor, read_only, start, keyboard, display)
        if outcome.kind == "lost":
            raise HolderGone
        return found, outcome


def send(where: Place, reference: str, data: bytes) -> dict[str, Any]:
    with _talking(where, reference) as (found, channel):
        try:
            return requests.send(channel, found.name, data, where.credential.claims.name, GATE_TIMEOUT)
        except TimedOut as error:
            raise TimedOut(
                error.message, "It may have got it, or get it yet: look at its output before you repeat it."
            ) from error


def output(where: Place, reference: str, start: int | None) -> Output:
    with _talking(where, reference) as (_, channel):
        return requests.output(channel, start)


def follow(where: Place, reference: str, start: int | None) -> Iterator[Output | dict[str, Any]]:
    with _talking(where, reference) as (_, channel):
        yield from requests.follow(channel, start)


def wait(where: Place, reference: str, pattern: str | None, timeout: float, start: int | None) -> dict[str, Any]:
    matcher = requests.compiled(pattern) if pattern is not None else None
    try:
        with _talking(where, reference) as (found, channel):
            result = requests.wait(channel, matcher, timeout, start)
            if result is not None:
                return result
            what = f"did not print {pattern!r}" if pattern is not None else "did not exit"
            raise TimedOut(f"session {found.name!r} {what} within {timeout:g} s", "It goes on; give --timeout more.")
    except HolderGone as error:
        farewell, end = error.args
        return {"exited": farewell.get("code"), "reason": farewell.get("reason"), "seq": end}


def turn(where: Place, reference: str, asked: host_turn.TurnOptions) -> dict[str, Any]:
    with _talking(where, reference) as (found, channel):
        return host_turn.over(channel, found.session, found.name, asked)
