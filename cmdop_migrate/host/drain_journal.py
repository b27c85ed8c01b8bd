"""Keep the drain state of this host on disk.

    STATE_DIR/draining.json     the drain flag: while it exists, no session starts or is restored here
    STATE_DIR/drains/ID.json    what each drain did with each session
    STATE_DIR/drain.lock        held by the command that drains or undrains this host

The flag is written and removed with the host's lock held (Host.locked), and every command that claims a session checks
it with that lock held: a session that started before the flag was set is on record when the drain lists them, and none
starts after it. Flag and journal are one module because the flag only names the journal entry of its drain.
"""

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
from cmdop_migrate.util import atomic, locks

FLAG = "draining.json"
VERSION = 1
KEPT = 20  # drains whose journals are kept
# going: begun; the next drain that finds it checks what became of it. failed: it could be neither moved nor parked, and
# keeps running here. left: not tried. ended: by itself. back: returned to this host by undrain.
DrainState = Literal["going", "moved", "parked", "failed", "left", "ended", "back"]
_log = log.get("drain")


@dataclass(frozen=True)
class DrainFlag:
    """Name the drain that set the flag, and when: `since` in seconds since the epoch."""

    drain: str
    since: float


def read_flag(state_dir: Path) -> DrainFlag | None:
    """Return the drain flag, or None if sessions may start here. An unreadable flag still forbids them."""
    try:
        data = json.loads((state_dir / FLAG).read_bytes())
        return DrainFlag(str(data["drain"]), float(data["since"]))
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError):
        return DrainFlag("", clock.walltime())


def write_flag(state_dir: Path, drain: str) -> None:
    """Set the drain flag. It is durable when this returns."""
    atomic.replace_json(str(state_dir / FLAG), asdict(DrainFlag(drain, clock.walltime())))
    _sync(state_dir)


def clear_flag(state_dir: Path) -> None:
    """Remove the drain flag. The removal is durable when this returns."""
    (state_dir / FLAG).unlink(missing_ok=True)
    _sync(state_dir)


def check_not_draining(state_dir: Path, host: str) -> None:
    """Raise Blocked if this host is being drained: no session may start here."""
    if (state_dir / FLAG).exists():
        raise Blocked(
            f"{host} is being drained: no session starts here", "Start it on another host, or: cmdop-migrate undrain"
        )


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class Entry:
    """Describe what a drain did with one session. `to`: the host it went to, by the name this host has for it. `facts`:
    what its migration or checkpoint returned."""

    session: str
    name: str
    state: DrainState
    to: str | None = None
    why: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        known = {"session": self.session, "name": self.name, "to": self.to, "why": self.why}
        return {key: value for key, value in known.items() if value} | self.facts


@dataclass(frozen=True)
class Drain:
    """Describe one drain of this host: the state of every session that it handled."""

    id: str
    host: str
    started: float
    entries: tuple[Entry, ...] = ()
    version: int = VERSION

    def with_entry(self, entry: Entry) -> Drain:
        """Return a copy in which `entry` replaces the one of the same session."""
        others = tuple(other for other in self.entries if other.session != entry.session)
        return replace(self, entries=(*others, entry))

    def of(self, *states: DrainState) -> list[Entry]:
        """Return the entries in one of these states."""
        return [entry for entry in self.entries if entry.state in states]


class Drains:
    """Read and write the journals of drains."""

    def __init__(self, state_dir: Path) -> None:
        self._dir, self._lock = state_dir / "drains", state_dir / "drain.lock"

    def begin(self, host: str) -> Drain:
        """Return a new drain, written to disk. Delete all journals but the newest KEPT."""
        drain = Drain(f"{int(clock.walltime())}-{os.urandom(3).hex()}", host, clock.walltime())
        self.save(drain)
        for old in self.all()[:-KEPT]:
            (self._dir / f"{old.id}.json").unlink(missing_ok=True)
        return drain

    def save(self, drain: Drain) -> Drain:
        """Write a drain to disk. It is durable when this returns."""
        self._dir.mkdir(mode=0o700, exist_ok=True)
        atomic.replace_json(str(self._dir / f"{drain.id}.json"), asdict(drain))
        return drain

    def all(self) -> list[Drain]:
        """Return all drains, oldest first. Unreadable journals are logged and skipped."""
        drains = [_read(path) for path in self._dir.glob("*.json")]
        return sorted((drain for drain in drains if drain is not None), key=lambda drain: (drain.started, drain.id))

    def find(self, ident: str) -> Drain | None:
        """Return the drain with this id, or None."""
        return _read(self._dir / f"{ident}.json") if ident else None

    def last(self) -> Drain | None:
        """Return the newest drain, or None."""
        drains = self.all()
        return drains[-1] if drains else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the drain lock for the duration of the block. Raise Blocked if another command drains or undrains this
        host."""
        fd = locks.open_file(self._lock)
        try:
            if not locks.try_lock(fd):
                pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                raise Blocked(
                    f"this host is being drained or undrained already, by process {pid or '?'}", "Wait for that."
                )
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(fd)


def _read(path: Path) -> Drain | None:
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}, this program knows {VERSION}")
        return Drain(**{**data, "entries": tuple(Entry(**entry) for entry in data["entries"])})
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        _log.warning("the drain journal %s cannot be read: %s", path, error)
        return None
