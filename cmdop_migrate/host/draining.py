"""Whether this host is being emptied: STATE_DIR/draining.json. While it is there, no session begins here.

Written and removed with the host's lock held (Host.locked), and looked at by whoever claims a session with that
lock held: what began before it is on record when the drain looks, and nothing begins after.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from cmdop_migrate import clock
from cmdop_migrate.errors import Blocked
from cmdop_migrate.util import atomic

NAME = "draining.json"


@dataclass(frozen=True)
class Draining:
    """`drain`: which one. `since`: seconds since the epoch."""

    drain: str
    since: float


def read(state_dir: Path) -> Draining | None:
    """None: sessions may begin here. A file that cannot be read still says that they may not."""
    try:
        data = json.loads((state_dir / NAME).read_bytes())
        return Draining(str(data["drain"]), float(data["since"]))
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError):
        return Draining("", clock.walltime())


def write(state_dir: Path, drain: str) -> None:
    """Durable when this returns."""
    atomic.replace_json(str(state_dir / NAME), asdict(Draining(drain, clock.walltime())))
    _sync(state_dir)


def clear(state_dir: Path) -> None:
    (state_dir / NAME).unlink(missing_ok=True)
    _sync(state_dir)


def refuse(state_dir: Path, host: str) -> None:
    """Blocked when no session may begin here."""
    if (state_dir / NAME).exists():
        raise Blocked(
            f"{host} is being drained: no session begins here", "Start it on another host, or: cmdop-migrate undrain"
        )


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
