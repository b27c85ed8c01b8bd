"""What each drain did with each session: STATE_DIR/drains/ID.json; and the lock of who drains this host."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cmdop_migrate import clock, log
from cmdop_migrate.errors import Blocked
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import Moves
from cmdop_migrate.util import atomic, locks

VERSION = 1
KEPT = 20  # drains that are remembered
# going: begun; a drain that finds it looks what became of it. failed: it could be neither moved nor parked, and runs on
# here. left: not tried. ended: by itself. back: brought home by undrain.
State = Literal["going", "moved", "parked", "failed", "left", "ended", "back"]
_log = log.get("drain")


@dataclass(frozen=True)
class Entry:
    """One session. `to`: the host it went to, as this one knows it. `facts`: what its move or checkpoint answered."""

    session: str
    name: str
    state: State
    to: str | None = None
    why: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        known = {"session": self.session, "name": self.name, "to": self.to, "why": self.why}
        return {key: value for key, value in known.items() if value} | self.facts


@dataclass(frozen=True)
class Drain:
    id: str
    host: str
    started: float
    entries: tuple[Entry, ...] = ()
    version: int = VERSION

    def with_entry(self, entry: Entry) -> Drain:
        others = tuple(one for one in self.entries if one.session != entry.session)
        return replace(self, entries=(*others, entry))

    def of(self, *states: State) -> list[Entry]:
        return [one for one in self.entries if one.state in states]


class Drains:
    def __init__(self, state_dir: Path) -> None:
        self._dir, self._lock = state_dir / "drains", state_dir / "drain.lock"

    def begin(self, host: str) -> Drain:
        """A new one, on disk; the oldest are forgotten."""
        drain = Drain(f"{int(clock.walltime())}-{os.urandom(3).hex()}", host, clock.walltime())
        self.save(drain)
        for old in self.all()[:-KEPT]:
            (self._dir / f"{old.id}.json").unlink(missing_ok=True)
        return drain

    def save(self, drain: Drain) -> Drain:
        """Durable when this returns."""
        self._dir.mkdir(mode=0o700, exist_ok=True)
        atomic.replace_json(str(self._dir / f"{drain.id}.json"), asdict(drain))
        return drain

    def all(self) -> list[Drain]:
        """Oldest first. What cannot be read is passed over, with a word in the log."""
        found = [_read(path) for path in self._dir.glob("*.json")]
        return sorted((one for one in found if one is not None), key=lambda one: (one.started, one.id))

    def find(self, ident: str) -> Drain | None:
        return _read(self._dir / f"{ident}.json") if ident else None

    def last(self) -> Drain | None:
        found = self.all()
        return found[-1] if found else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Blocked when another command drains or undrains this host."""
        fd = locks.open_file(self._lock)
        try:
            if not locks.try_lock(fd):
                who = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                raise Blocked(
                    f"this host is being drained or undrained already, by process {who or '?'}", "Wait for that."
                )
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(fd)


def is_free(this_host: Host, moves: Moves, session: str) -> bool:
    """It lives here, and no other command is at it, left over from a drain that was killed."""
    with moves.lock(session) as is_ours:
        if not is_ours:
            return False
    record = this_host.load(session)
    if record is None or record.phase != "live":
        return False
    return bool(talk.row(this_host, record)["state"] != "checkpointing")


def _read(path: Path) -> Drain | None:
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}, this program knows {VERSION}")
        return Drain(**{**data, "entries": tuple(Entry(**one) for one in data["entries"])})
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        _log.warning("the record %s of a drain cannot be read: %s", path, error)
        return None
