"""Open what checkpoint and restore both need before they begin: the store, the keys, a CRIU."""

from __future__ import annotations

import shutil
from pathlib import Path

from cmdop_migrate.config import DEFAULT_STATE_DIR, Config
from cmdop_migrate.criu.install import find
from cmdop_migrate.criu.install.find import Criu
from cmdop_migrate.errors import Blocked, CriuFailed
from cmdop_migrate.images.format import keys
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.storage import registry
from cmdop_migrate.storage.base import Store
from cmdop_migrate.storage.rate_limit import RateLimitedStore
from cmdop_migrate.util.faults import TEST_STOP
from cmdop_migrate.util.timings import Phases

KEPT_LOGS = 50  # logs of failed CRIU runs
__all__ = ["TEST_STOP", "Phases", "criu_prefixes", "find_criu", "keep_log", "open_keys", "open_store"]


def open_store(config: Config) -> Store:
    """Open the configured store, with its bandwidth limit."""
    store = registry.open_reliable(config.store)
    return RateLimitedStore(store, config.bandwidth) if config.bandwidth is not None else store


def open_keys(config: Config) -> KeyRing:
    """Load this host's keys. Create them if they do not exist."""
    return keys.load_or_create(config.key_file)


def criu_prefixes(config: Config) -> list[Path]:
    """Return the directories where a private CRIU may be: this host's, then the machine's, which its hosts share."""
    return list(dict.fromkeys((config.state_dir / "criu", Path(DEFAULT_STATE_DIR) / "criu")))


def find_criu(config: Config) -> Criu:
    """Return the configured CRIU, the system's, this host's private one, or the machine's. Raise Blocked if none works
    on this kernel."""
    for prefix in criu_prefixes(config):
        criu = find.find(config.criu, prefix)
        if criu is not None:
            return criu
    raise Blocked("no CRIU that works on this kernel", "Get one with: cmdop-migrate doctor --fix")


def keep_log(error: CriuFailed, images: Path, config: Config, name: str, session: str) -> CriuFailed:
    """Copy CRIU's whole log out of a directory that is about to be deleted. Return the error with the new path in its
    hint. Each session keeps the log of its last failed dump and of its last failed restore; the oldest of all are
    deleted."""
    kept = config.log_file.with_name(f"criu-{name}-{session}.log")
    try:
        shutil.copyfile(images / f"{name}.log", kept)
        others = sorted(kept.parent.glob("criu-*-*.log"), key=lambda path: path.stat().st_mtime)
        for path in others[:-KEPT_LOGS]:
            path.unlink(missing_ok=True)
    except OSError:
        return error  # CRIU died before it wrote a log, or the disk is full
    moved = CriuFailed(error.message, error.hint.replace(str(images / f"{name}.log"), str(kept)))
    moved.passing = error.passing
    return moved
