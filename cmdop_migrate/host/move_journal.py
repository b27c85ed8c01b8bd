"""Keep the journal of migrations, STATE_DIR/migrations/ID.json, and one lock per session for the command that works on
its migration."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from cmdop_migrate import clock, log
from cmdop_migrate.errors import Blocked, NotFound, Usage
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Record
from cmdop_migrate.util import atomic, locks

VERSION = 1
LOCK_TIMEOUT = 2.0  # seconds to wait for a session's lock, which the agent takes for moments
SOMEWHERE = "another host"  # not a host's name: the target is not known any more
_log = log.get("migrate")


class End(StrEnum):
    """Say where a session is when its migration is over."""

    ON_SOURCE = "on_source"
    ON_TARGET = "on_target"
    PARKED = "parked"
    EXITED = "exited"  # by itself, or with its holder before there was a checkpoint to restore


@dataclass(frozen=True)
class Move:
    """Describe one migration. `token`: of the incarnation that moves. `checkpoint`: what the target restores, once it
    is complete in the store; `parent`: the one before it. `told`: the end was reported to a person. `figures`: the new
    fencing token, the frozen time and the time of each phase, once they are known."""

    id: str
    session: str
    name: str
    source: str
    target: str
    token: int
    started: float
    step: str = "begin"
    checkpoint: str | None = None
    parent: str | None = None
    ahead: tuple[str, ...] = ()
    error: str | None = None
    end: End | None = None
    ended: float | None = None
    told: bool = False
    figures: dict[str, Any] | None = None
    version: int = VERSION

    def to_json(self) -> dict[str, Any]:
        """Return the migration as `resume` prints it."""
        return {
            "id": self.id,
            "session": self.session,
            "name": self.name,
            "from": self.source,
            "to": self.target,
            "step": self.step,
            "checkpoint": self.checkpoint,
            "error": self.error,
            "ended": self.end,
        }


class Moves:
    """Read and write the journals of migrations."""

    def __init__(self, state_dir: Path, keep: float) -> None:
        """Open the journals in `state_dir`. `keep`: seconds for which the journal of an ended migration is kept."""
        self._dir, self._keep = state_dir / "migrations", keep

    def begin(self, session: str, name: str, source: str, target: str, token: int) -> Move:
        """Return a new migration, written to disk."""
        move = Move(os.urandom(6).hex(), session, name, source, target, token, clock.walltime())
        self.save(move)
        return move

    def save(self, move: Move) -> Move:
        """Write a migration to disk. It is durable when this returns."""
        self._dir.mkdir(mode=0o700, exist_ok=True)
        atomic.replace_json(str(self._dir / f"{move.id}.json"), asdict(move))
        folder = os.open(self._dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return move

    def replace_missing(self, this_host: Host) -> None:
        """Begin a new journal for each session that is frozen and handed over but has no readable journal: it was
        damaged, or another version of this program wrote it. The session's own record holds all that is needed to
        decide."""
        known = {move.session for move in self.open()}
        for handing in [one for one in this_host.all() if one.phase == "handing" and one.session not in known]:
            with self.lock(handing.session) as is_ours:
                record = this_host.load(handing.session)  # again: with the lock held
                if not is_ours or record is None or record.phase != "handing":
                    continue
                if not any(move.session == record.session for move in self.open()):
                    _log.warning("session %s: the journal of its migration is missing; its lease decides", record.name)
                    made = self.begin(record.session, record.name, record.host, SOMEWHERE, record.token)
                    self.save(replace(made, step="hand over", checkpoint=record.checkpoint))

    def end(self, move: Move, end: End, told: bool) -> Move:
        """Record where the session is and whether that was reported."""
        return self.save(replace(move, end=end, ended=clock.walltime(), told=told))

    def all(self) -> list[Move]:
        """Return all migrations, oldest first. Unreadable journals are logged and skipped."""
        moves = []
        for path in self._dir.glob("*.json"):
            move = read(path)
            if move is not None:
                moves.append(move)
        return sorted(moves, key=lambda move: (move.started, move.id))

    def open(self) -> list[Move]:
        """Return the migrations that have not ended."""
        return [move for move in self.all() if move.end is None]

    def find(self, reference: str) -> Move:
        """Return a migration by its id or a prefix of it, or the last one of a session by name or id. Raise NotFound,
        or Usage if the prefix is ambiguous."""
        moves = self.all()
        by_id = [move for move in moves if reference and move.id.startswith(reference)]
        if len(by_id) > 1:
            raise Usage(f"{reference!r} is the start of several migrations", "Give more of the id.")
        for group in (by_id, [move for move in moves if reference in (move.session, move.name)]):
            if group:
                return group[-1]
        raise NotFound(f"no migration {reference!r} on this host", "See: cmdop-migrate resume")

    def forget_old(self) -> None:
        """Delete the journals of migrations that ended long ago. With the last one of a session delete its lock file,
        unless a process holds it."""
        moves = self.all()
        old = [move for move in moves if move.end and move.told and clock.walltime() - (move.ended or 0.0) > self._keep]
        kept = {move.session for move in moves if move not in old}
        for move in old:
            (self._dir / f"{move.id}.json").unlink(missing_ok=True)
            with self.lock(move.session) as is_ours:
                if is_ours and move.session not in kept:
                    (self._dir / f"{move.session}.lock").unlink(missing_ok=True)

    @contextmanager
    def lock(self, session: str, timeout: float = 0.0) -> Iterator[bool]:
        """Hold the lock of a session's migration for the duration of the block. Yield False if another process still
        holds it after `timeout` seconds; the agent holds it now and then, for a moment."""
        self._dir.mkdir(mode=0o700, exist_ok=True)
        fd = locks.try_take_current(self._dir / f"{session}.lock", timeout)
        try:
            yield fd is not None
        finally:
            if fd is not None:
                os.close(fd)

    @contextmanager
    def alone(self, session: str, name: str) -> Iterator[None]:
        """Hold the lock of a session's migration. Raise Blocked if another command works on it."""
        with self.lock(session, LOCK_TIMEOUT) as is_ours:
            if not is_ours:
                raise Blocked(f"session {name!r} is being moved already", "Wait for that, or see: cmdop-migrate ls")
            yield


def read(path: Path) -> Move | None:
    """Return the migration in a journal file; None if the file is missing or unreadable."""
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}, this program knows {VERSION}")
        end = End(data["end"]) if data["end"] else None
        return Move(**{**data, "end": end, "ahead": tuple(data["ahead"])})
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        _log.warning("the migration journal %s cannot be read: %s", path, error)
        return None


def has_moved(record: Record | None) -> bool:
    """Tell whether a session has moved to another host, by its record, which says so before the journal of its
    migration does."""
    return record is not None and record.exit is not None and record.exit.kind == "moved"
