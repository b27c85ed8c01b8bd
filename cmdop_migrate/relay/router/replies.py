"""Build the frames that the router sends, built from its state, and the parsing of frames that hosts send. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cmdop_migrate.relay.frames import PAYLOAD_MAX, Frame, FrameError, Kind, with_table
from cmdop_migrate.relay.router.routing_state import Channel, Claim, Entry

INFO_MAX = 2048
NAME_MAX = 63
STATE_MAX = 40


def claim(conn: int, frame: Frame) -> Claim:
    """Parse a REGISTER. Raise FrameError."""
    if not frame.session or not frame.token:
        raise FrameError("REGISTER needs a session and a token")
    info = frame.table().get("info", {})
    name, state = frame.text("name"), frame.text("state", "running")
    if not 0 < len(name) <= NAME_MAX or not name.isprintable() or len(state) > STATE_MAX:
        raise FrameError("REGISTER with a bad name or state")
    if not isinstance(info, dict) or len(json.dumps(info)) > INFO_MAX:
        raise FrameError(f"REGISTER with an info of more than {INFO_MAX} bytes, or an invalid one")
    return Claim(conn, frame.token, name, state, info)


def moved(host: str, frame: Frame) -> dict[str, Any]:
    """Parse a MOVED into the fields that listings show. Raise FrameError."""
    table = frame.table()
    phases = table.get("phases", {})
    figures = [table.get(name) for name in ("at", "frozen_s", "downtime_s")]
    if not frame.session or not frame.token or not isinstance(phases, dict) or len(frame.payload) > INFO_MAX:
        raise FrameError("MOVED without a session, a token or phases, or too long")
    if not all(type(seconds) in (int, float) for seconds in phases.values()) or not all(
        figure is None or type(figure) in (int, float) for figure in figures
    ):
        raise FrameError("MOVED with figures that are not numbers")
    at, frozen, downtime = figures
    known = {"from": host, "to": frame.text("to")[:NAME_MAX], "token": frame.token, "at": at}
    return {**known, "frozen_s": frozen, "downtime_s": downtime, "phases": phases}


def listing(entries: Iterable[Entry], moves: Mapping[str, dict[str, Any]]) -> Iterator[Frame]:
    """Yield the listing in as many frames as it takes; all but the last have `more` set."""
    page: list[dict[str, Any]] = []
    size = 0
    for entry in entries:
        row = {**_listed(entry), "moved": moves.get(entry.session)}
        cost = len(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()) + 1
        if size + cost > PAYLOAD_MAX - 64:
            yield with_table(Kind.LISTING, {"sessions": page, "more": True})
            page, size = [], 0
        page.append(row)
        size += cost
    yield with_table(Kind.LISTING, {"sessions": page, "more": False})


def status(entry: Entry, channel: Channel) -> Frame:
    """Return a STATUS frame: where the session of a channel is."""
    route = entry.route
    state = "routed" if route else entry.state
    token = route.token if route else entry.highest
    facts = {"state": state, "host": route.host if route else None, "to": entry.to or None, "token": token}
    return with_table(Kind.STATUS, facts, channel.session, token, channel.number)


def close(code: str, why: str) -> Frame:
    """Return a CLOSE frame. Session, token and channel are filled in for each receiver."""
    return with_table(Kind.CLOSE, {"code": code, "why": why})


def refused(code: str, why: str, session: str = "", token: int = 0, channel: int = 0) -> Frame:
    """Return a REFUSED frame."""
    return with_table(Kind.REFUSED, {"code": code, "why": why}, session, token, channel)


def _listed(entry: Entry) -> dict[str, Any]:
    route = entry.route
    return {
        "session": entry.session,
        "name": entry.name,
        "host": route.host if route else None,
        "to": entry.to or None,
        "state": route.state if route else entry.state,
        "routed": route is not None,
        "token": route.token if route else entry.highest,
        "clients": len(route.channels) if route else len(entry.waiting),
        "info": route.info if route else {},
    }
