"""The journal of migrations: STATE_DIR/migrations/ID.json, one a move; and a lock a session for who is at it."""

from __future__ import annotations

import fcntl
import json
import os
import time
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
from cmdop_migrate.util import atomic

VERSION = 1
PATIENCE = 2.0
SOMEWHERE = "another host"  # no host is called so: where it was to go is not known any more
_log = log.get("migrate")


class End(StrEnum):
    """Where a session is when its move is over."""

    ON_SOURCE = "on_source"
    ON_TARGET = "on_target"
    PARKED = "parked"
    EXITED = "exited"  # it ended by itself, or with its holder before there was anything to bring it back from


@dataclass(frozen=True)
class Move:
    """One migration. `token`: of the incarnation that moves. `checkpoint`: what the target restores, once it is whole
    in the store; `parent`: the one before it. `told`: somebody was told how it ended. `figures`: the token it went on
    under, how long it stood still and each phase took, once that is known."""

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
        """As `resume` answers it."""
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
    def __init__(self, state_dir: Path, keep: float) -> None:
        """`keep`: seconds for which one that has ended is remembered."""
        self._dir, self._keep = state_dir / "migrations", keep

    def begin(self, session: str, name: str, source: str, target: str, token: int) -> Move:
        """A new one, on disk."""
        move = Move(os.urandom(6).hex(), session, name, source, target, token, clock.walltime())
        self.save(move)
        return move

    def save(self, move: Move) -> Move:
        """Durable when this returns."""
        self._dir.mkdir(mode=0o700, exist_ok=True)
        atomic.replace_json(str(self._dir / f"{move.id}.json"), asdict(move))
        folder = os.open(self._dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return move

    def stand_in(self, this_host: Host) -> None:
        """A new journal for each session that stands still, handed over, and has none that can be read: it was damaged,
        or another version of this program wrote it. What is decided by is in the session's own record."""
        known = {one.session for one in self.open()}
        for standing in [one for one in this_host.all() if one.phase == "handing" and one.session not in known]:
            with self.lock(standing.session) as is_ours:
                record = this_host.load(standing.session)  # again: with the lock held
                if not is_ours or record is None or record.phase != "handing":
                    continue
                if not any(one.session == record.session for one in self.open()):
                    _log.warning("session %s: the journal of its move is gone; its lease tells", record.name)
                    made = self.begin(record.session, record.name, record.host, SOMEWHERE, record.token)
                    self.save(replace(made, step="hand over", checkpoint=record.checkpoint))

    def end(self, move: Move, end: End, told: bool) -> Move:
        return self.save(replace(move, end=end, ended=clock.walltime(), told=told))

    def all(self) -> list[Move]:
        """Oldest first. What cannot be read is passed over, with a word in the log."""
        found = []
        for path in self._dir.glob("*.json"):
            move = read(path)
            if move is not None:
                found.append(move)
        return sorted(found, key=lambda one: (one.started, one.id))

    def open(self) -> list[Move]:
        """Those that have not ended."""
        return [one for one in self.all() if one.end is None]

    def find(self, reference: str) -> Move:
        """By id or the start of it, or by its session's name or id: then the last one."""
        moves = self.all()
        by_id = [one for one in moves if reference and one.id.startswith(reference)]
        if len(by_id) > 1:
            raise Usage(f"{reference!r} is the start of several migrations", "Give more of the id.")
        for group in (by_id, [one for one in moves if reference in (one.session, one.name)]):
            if group:
                return group[-1]
        raise NotFound(f"no migration {reference!r} on this host", "See: cmdop-migrate resume")

    def forget_old(self) -> None:
        """Those that ended long ago. With the last one of a session goes its lock, unless somebody has it."""
        moves = self.all()
        old = [one for one in moves if one.end and one.told and clock.walltime() - (one.ended or 0.0) > self._keep]
        kept = {one.session for one in moves if one not in old}
        for one in old:
            (self._dir / f"{one.id}.json").unlink(missing_ok=True)
            with self.lock(one.session) as is_ours:
                if is_ours and one.session not in kept:
                    (self._dir / f"{one.session}.lock").unlink(missing_ok=True)

    @contextmanager
    def lock(self, session: str, patience: float = 0.0) -> Iterator[bool]:
        """Whether nobody else is at a move of this session; then nobody will be while this lasts. `patience`: the agent
        has it now and then, for a moment."""
        self._dir.mkdir(mode=0o700, exist_ok=True)
        until = time.monotonic() + patience
        fd = _locked(self._dir / f"{session}.lock")
        while fd is None and time.monotonic() < until:
            time.sleep(0.05)
            fd = _locked(self._dir / f"{session}.lock")
        try:
            yield fd is not None
        finally:
            if fd is not None:
                os.close(fd)

    @contextmanager
    def alone(self, session: str, name: str) -> Iterator[None]:
        """Blocked when another command is at a move of this session."""
        with self.lock(session, PATIENCE) as is_ours:
            if not is_ours:
                raise Blocked(f"session {name!r} is being moved already", "Wait for that, or see: cmdop-migrate ls")
            yield


def _locked(path: Path) -> int | None:
    """The lock, or None: somebody has it. A file that was removed by who had it before is not it any more."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:
            pass
        os.close(fd)


def read(path: Path) -> Move | None:
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}, this program knows {VERSION}")
        end = End(data["end"]) if data["end"] else None
        return Move(**{**data, "end": end, "ahead": tuple(data["ahead"])})
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        _log.warning("the journal %s cannot be read: %s", path, error)
        return None


def has_moved(record: Record | None) -> bool:
    """By its record, which says so before the journal of its move does."""
    return record is not None and record.exit is not None and record.exit.kind == "moved"
