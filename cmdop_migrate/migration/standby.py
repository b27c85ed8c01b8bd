"""The target's side of a migration: everything that can be done beforehand, then wait for the session's lease.

Started by the source over SSH before it freezes anything. While the session still runs there, what its lease names
(--pre-ship) is fetched ahead. The moment the lease is parked at a checkpoint made for this very migration, it is
restored. Whoever started us can take that back only by winning the lease. When nobody listens any more, we leave.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cmdop_migrate import clock, log
from cmdop_migrate.errors import Blocked, Fenced, PeerLost, SessionExited, TimedOut, Unreachable
from cmdop_migrate.host import agent_process, leases, resources
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.references import Chosen
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.read import reader
from cmdop_migrate.images.read.prefetched import PrefetchedStore
from cmdop_migrate.images.read.reader import Image
from cmdop_migrate.images.store import catalog
from cmdop_migrate.lease.record import LeaseRecord
from cmdop_migrate.lease.store import LeaseStore
from cmdop_migrate.migration.prefetch import Gathering
from cmdop_migrate.migration.prefetch_directory import Ahead
from cmdop_migrate.snapshot import image_checks
from cmdop_migrate.snapshot.restore import Known
from cmdop_migrate.storage.base import Store
from cmdop_migrate.util.timings import Phases

LOOK_EVERY = 0.02
AWAY = 0.2
BEAT = 0.5
WORKING = "working"
PATIENCE = 3600.0
MIGRATION = "migration"  # the fact of a manifest that says what it was made for
_log = log.get("standby")
Tell = Callable[[dict[str, Any]], None]


class Standby:
    """`tell` hears {"phase": "ready"}, then {"phase": "ahead", "checkpoint": …} for each that was fetched; it raises
    OSError when nobody listens any more."""

    def __init__(self, this_host: Host, session: str, migration: str, tell: Tell) -> None:
        self._this_host, self._session, self._migration, self._tell = this_host, session, migration, tell
        self._config = this_host.config
        self._kept = Ahead(self._config.state_dir, session)
        self._ahead: list[Image] = []  # each needs the one before
        self._told_at = 0.0

    def wait(self) -> Known:
        """What is to be restored, and what of it is here already."""
        criu = resources.find_criu(self._config)
        store, ring = resources.open_store(self._config), resources.open_keys(self._config)
        agent_process.ensure(self._config)
        self._say({"phase": "ready"})
        Phases("restore").reach("standby")
        held = leases.open_store(self._config)
        near = self._kept.dir / "packs"
        unused = PrefetchedStore(resources.open_store(self._config), near)
        try:
            with Gathering(store, near, meanwhile=self._beat):  # who waits for us takes silence for an answer
                manifest = self._watch(held, PrefetchedStore(store, near), ring)
        finally:
            held.close()  # it must not be used on both sides of a fork
        self._make_room(manifest, near)
        chosen = Chosen(manifest, self._this_host.load(self._session))
        return Known(criu, chosen, self._ahead[-1] if self._ahead else None, unused)

    def _make_room(self, manifest: Manifest, near: Path) -> None:
        """What was brought on a guess must not be what fills the disk."""
        try:
            image_checks.check_room(self._config.state_dir, manifest)
        except Blocked:
            shutil.rmtree(near)

    def close(self) -> None:
        for image in reversed(self._ahead):
            image.close()
        self._kept.close()

    def _watch(self, held: LeaseStore, store: Store, ring: KeyRing) -> Manifest:
        until = clock.boottime() + PATIENCE
        seen: str | None = None
        while (began := clock.boottime()) < until:
            record = self._look(held)
            took = clock.boottime() - began
            if record is not None and record.state == "free" and record.checkpoint is None:
                raise SessionExited(f"session {self._session[:12]} has ended", "There is nothing to restore.")
            if record is not None and record.checkpoint is not None:
                parked = record.state == "parked"
                if parked or record.checkpoint != seen:
                    manifest = catalog.load(store, ring, record.checkpoint, self._session)
                    ours = manifest.facts.get(MIGRATION) == self._migration
                    if parked and ours:
                        return manifest
                    if parked:
                        raise Fenced(
                            f"session {self._session[:12]} was parked by someone else meanwhile", "It stays parked."
                        )
                    seen = record.checkpoint
                    if ours:
                        self._fetch_ahead(store, ring, manifest)
            self._beat()
            time.sleep(max(LOOK_EVERY, took))  # a slow store is asked less often
        raise TimedOut(f"session {self._session[:12]} was not handed over within {PATIENCE:.0f} s", "Migrate it again.")

    def _look(self, held: LeaseStore) -> LeaseRecord | None:
        try:
            found = held.inspect(self._session)
        except Unreachable as error:
            _log.info("the lease store is away: %s", error.message)
            time.sleep(AWAY)
            return None
        return found.record if found else None

    def _fetch_ahead(self, store: Store, ring: KeyRing, manifest: Manifest) -> None:
        """Beside the one before, which it shares most of its chunks with."""
        image_checks.check_room(self._config.state_dir, manifest)
        where = self._kept.dir / manifest.checkpoint
        before = self._ahead[-1] if self._ahead else None
        self._ahead.append(reader.fetch(store, ring, manifest, where, base=before))
        self._say({"phase": "ahead", "checkpoint": manifest.checkpoint})

    def _beat(self) -> None:
        if clock.boottime() - self._told_at > BEAT:
            self._say({"phase": "waiting"})

    def _say(self, facts: dict[str, Any]) -> None:
        self._told_at = clock.boottime()
        try:
            self._tell({**facts, "at": self._told_at})
        except OSError as error:
            raise PeerLost("whoever was to hand the session over is gone", "Nothing was done here.") from error


class Pulse:
    """What a restore says, and, from its first word on, every half second that this host and the way to it are alive.
    Not before: whoever says that first word was forked, and there must be no thread then."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Pulse:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def say(self, phase: str) -> None:
        with self._lock:
            self._tell({"phase": phase, "at": clock.boottime()})
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
            self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with self._lock:
                self._tell({"phase": WORKING, "at": clock.boottime()})
