"""What a relay is to know of this host's sessions: which live here, and where those go that do not any more.

    record                                          relay
    live, under this token                          REGISTER
    live, but under another token than registered   REGISTER anew
    handing over to another host                    LEAVE moving, to that host
    exited: moved or superseded                     LEAVE moving
    parked, or died with its holder                 LEAVE parked: from its last checkpoint, if any, it may come back
    exited, or gone                                 LEAVE exited

Reading is kept apart from judging: `changes` is pure.
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

RECENT = 5.0
Stamp = tuple[int, int, int]
State = Literal["moving", "parked", "exited"]
SHIPPING = ("ship", "hand over", "restore", "forget")  # steps of a move in which the session stands still here


@dataclass(frozen=True)
class Standing:
    """One session on this host. `to`: where a move takes it, while it is frozen for that."""

    session: str
    token: int
    name: str
    phase: Phase | Literal["gone"]
    to: str | None = None
    exit: Exit | None = None


@dataclass(frozen=True)
class Leaving:
    session: str
    token: int
    state: State
    to: str | None = None


def changes(known: Mapping[str, int], seen: Mapping[str, Standing]) -> tuple[list[Standing], list[Leaving]]:
    """`known`: what the relay was told, session -> token; `seen`: how it is -> what is to be told."""
    coming = [one for one in seen.values() if one.phase == "live" and known.get(one.session) != one.token]
    leaving = []
    for session, token in known.items():
        one = seen.get(session)
        if one is None or one.phase != "live":
            leaving.append(Leaving(session, token, *_state(one)))
    return coming, leaving


def _state(one: Standing | None) -> tuple[State, str | None]:
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


class Lookout:
    """This host's sessions as they are now. Cheap to ask: only what changed is read again."""

    def __init__(self, this_host: Host, watch: Watch) -> None:
        self._this_host, self._watch = this_host, watch
        self._read: dict[str, tuple[Stamp, Record | None]] = {}
        self._moves: dict[str, tuple[Stamp, move_journal.Move | None]] = {}
        self._migrations = this_host.config.state_dir / "migrations"

    def look(self) -> dict[str, Standing]:
        for place in (self._this_host.config.state_dir, self._this_host.config.sessions_dir, self._migrations):
            self._watch.add(place)
        open_moves = self._open_moves()
        ids = self._this_host.ids()
        for gone in self._read.keys() - set(ids):
            del self._read[gone]
        found = {}
        for session in ids:
            record = self._record(session)
            if record is not None:
                move = open_moves.get(session)
                to = move.target if move else None
                found[session] = Standing(session, record.token, record.name, record.phase, to, record.exit)
        return found

    def is_moving(self, told: Container[str]) -> bool:
        """Whether a move from here is about to end, or has just ended and is not among those `told` of."""
        known = [move for _, move in self._moves.values() if move is not None]
        recent = clock.walltime() - RECENT
        ended = [one for one in known if one.end is move_journal.End.ON_TARGET and (one.ended or 0.0) > recent]
        is_open = any(one.end is None and one.step in SHIPPING for one in known)
        return is_open or any(one.id not in told for one in ended)

    def moved(self) -> list[move_journal.Move]:
        """The last move of each session that went elsewhere from here, as of the last look."""
        done = [move for _, move in self._moves.values() if move is not None and move.figures and move.figures["token"]]
        return list({one.session: one for one in sorted(done, key=lambda one: one.started)}.values())

    def _record(self, session: str) -> Record | None:
        directory = self._this_host.directory(session)
        stamp = _stamp(directory / "session.json")
        before = self._read.get(session)
        if before is None:
            self._watch.add(directory)
            stamp = _stamp(directory / "session.json")  # it may have changed just before it was watched
        if before is None or before[0] != stamp:
            try:
                self._read[session] = (stamp, self._this_host.load(session))
            except OSError:
                return before[1] if before else None  # its disk fails: it is still what it was
        return self._read[session][1]

    def _open_moves(self) -> dict[str, move_journal.Move]:
        """Those that have their session standing still here."""
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
        found = [move for _, move in self._moves.values() if move is not None]
        return {one.session: one for one in found if one.end is None and one.step in SHIPPING}


def _stamp(path: Path) -> Stamp:
    """Files are replaced, not written to: another inode is another file, however coarse the clock."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)
