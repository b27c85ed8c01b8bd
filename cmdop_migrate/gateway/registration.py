"""Decide what to register at a relay: the sessions that run on this host, and where those went that no longer do.

    record                                          relay
    live, under this token                          REGISTER
    live, but under another token than registered   REGISTER anew
    handing over to another host                    LEAVE moving, to that host
    exited: moved or superseded                     LEAVE moving
    parked, or died with its holder                 LEAVE parked: its last checkpoint, if any, may be restored
    exited, or deleted                              LEAVE exited

`SessionWatcher` reads the records; `changes`, which decides, is pure.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cmdop_migrate import clock
from cmdop_migrate.host import move_journal
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Exit, Phase, Record
from cmdop_migrate.util.inotify import Watch

RECENT = 5.0  # seconds after its end in which a move is waited for to be reported
Stamp = tuple[int, int, int]
State = Literal["moving", "parked", "exited"]
SHIPPING = ("ship", "hand over", "restore", "forget")  # steps of a move in which the session is frozen on this host


@dataclass(frozen=True)
class SessionStatus:
    """Represent a session's status on this host. `to`: the target of a move, while it is frozen for it."""

    session: str
    token: int
    name: str
    phase: Phase | Literal["gone"]
    to: str | None = None
    exit: Exit | None = None


@dataclass(frozen=True)
class Departure:
    """Represent a session that was registered and no longer runs here."""

    session: str
    token: int
    state: State
    to: str | None = None


def changes(
    registered: Mapping[str, int], seen: Mapping[str, SessionStatus]
) -> tuple[list[SessionStatus], list[Departure]]:
    """Return the sessions to register and those to take back. `registered`: session -> fencing token."""
    coming = [new for new in seen.values() if new.phase == "live" and registered.get(new.session) != new.token]
    leaving = []
    for session, token in registered.items():
        status = seen.get(session)
        if status is None or status.phase != "live":
            leaving.append(Departure(session, token, *_state(status)))
    return coming, leaving


def _state(one: SessionStatus | None) -> tuple[State, str | None]:
    if one is None or one.phase == "gone":
        return "exited", None
    if one.phase in ("handing", "starting", "restoring"):
        return "moving", one.to
    if one.phase == "parked":
        return "parked", None
    if one.exit is not None and one.exit.kind == "holder_died":
        return "parked", None
    if one.exit is not None and one.exit.kind in ("moved", "superseded"):
        return "moving", one.exit.to
    return "exited", None


class SessionWatcher:
    """Report this host's sessions. A scan is cheap: only records that changed are read again."""

    def __init__(self, this_host: Host, watch: Watch) -> None:
        self._this_host, self._watch = this_host, watch
        self._read: dict[str, tuple[Stamp, Record | None]] = {}
        self._moves: dict[str, tuple[Stamp, move_journal.Move | None]] = {}
        self._migrations = this_host.config.state_dir / "migrations"

    def scan(self) -> dict[str, SessionStatus]:
        """Return all sessions as they are now."""
        for place in (self._this_host.config.state_dir, self._this_host.config.sessions_dir, self._migrations):
            self._watch.add(place)
        open_moves = self._open_moves()
        ids = self._this_host.ids()
        for gone in self._read.keys() - set(ids):
            del self._read[gone]
        statuses = {}
        for session in ids:
            record = self._record(session)
            if record is not None:
                move = open_moves.get(session)
                to = move.target if move else None
                statuses[session] = SessionStatus(session, record.token, record.name, record.phase, to, record.exit)
        return statuses

    def is_moving(self, reported: Container[str]) -> bool:
        """Return whether a move from this host is about to end, or has just ended and is not `reported` yet."""
        known = [move for _, move in self._moves.values() if move is not None]
        recent = clock.walltime() - RECENT
        ended = [move for move in known if move.end is move_journal.End.ON_TARGET and (move.ended or 0.0) > recent]
        is_open = any(move.end is None and move.step in SHIPPING for move in known)
        return is_open or any(move.id not in reported for move in ended)

    def moved(self) -> list[move_journal.Move]:
        """Return the last move of each session that was moved from this host, as of the last scan."""
        done = [move for _, move in self._moves.values() if move is not None and move.figures and move.figures["token"]]
        return list({move.session: move for move in sorted(done, key=lambda move: move.started)}.values())

    def _record(self, session: str) -> Record | None:
        directory = self._this_host.directory(session)
        stamp = _stamp(directory / "session.json")
        before = self._read.get(session)
        if before is None:
            self._watch.add(directory)
            stamp = _stamp(directory / "session.json")  # the record may have changed just before the watch was added
        if before is None or before[0] != stamp:
            try:
                self._read[session] = (stamp, self._this_host.load(session))
            except OSError:
                return before[1] if before else None  # the disk fails: report the last known state
        return self._read[session][1]

    def _open_moves(self) -> dict[str, move_journal.Move]:
        """Return the moves whose session is frozen on this host, by session."""
        try:
            names = [name for name in os.listdir(self._migrations) if name.endswith(".json")]
        except FileNotFoundError:
            names = []
        for gone in self._moves.keys() - set(names):
            del self._moves[gone]
        for name in names:
            stamp = _stamp(self._migrations / name)
            if self._moves.get(name, (None,))[0] != stamp:
                self._moves[name] = (stamp, move_journal.read(self._migrations / name))
        known = [move for _, move in self._moves.values() if move is not None]
        return {move.session: move for move in known if move.end is None and move.step in SHIPPING}


def _stamp(path: Path) -> Stamp:
    """Return a value that differs when a file was replaced: files get a new inode, however coarse the clock is."""
    try:
        stat = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size)
