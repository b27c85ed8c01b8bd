"""Stand by as the target of a migration: prepare everything, then wait for the session's lease.

The source starts this over SSH before it freezes the session. While the session still runs there, the checkpoints its
lease names (the pre-copy rounds of --pre-ship) are prefetched. As soon as the lease is parked at a checkpoint made for
this migration, that checkpoint is restored; the source can prevent this only by winning the lease. When the source no
longer reads the progress lines, this process exits.
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
from cmdop_migrate.migration.prefetch import PackPrefetch, PrefetchDirectory
from cmdop_migrate.snapshot import image_checks
from cmdop_migrate.snapshot.restore import PreparedRestore
from cmdop_migrate.storage.base import Store
from cmdop_migrate.util.timings import Phases

LEASE_POLL_INTERVAL = 0.02
UNREACHABLE_PAUSE = 0.2  # seconds before an unreachable lease store is asked again
HEARTBEAT_INTERVAL = 0.5
WORKING = "working"  # the phase of a heartbeat
HAND_OVER_TIMEOUT = 3600.0
MIGRATION = "migration"  # the fact of a manifest that names the migration it was made for
_log = log.get("standby")
Tell = Callable[[dict[str, Any]], None]


class Standby:
    """Wait for one session that is migrated to this host.

    `tell` receives {"phase": "ready"}, then {"phase": "ahead", "checkpoint": …} for each prefetched checkpoint; it
    raises OSError when the source no longer reads."""

    def __init__(self, this_host: Host, session: str, migration: str, tell: Tell) -> None:
        self._this_host, self._session, self._migration, self._tell = this_host, session, migration, tell
        self._config = this_host.config
        self._directory = PrefetchDirectory(self._config.state_dir, session)
        self._prefetched: list[Image] = []  # each shares chunks with the one before, and needs its files
        self._told_at = 0.0

    def wait(self) -> PreparedRestore:
        """Wait until the session is handed over. Return what is to be restored, and what was prefetched of it. Raises
        SessionExited, Fenced, TimedOut, or PeerLost if the source is gone."""
        criu = resources.find_criu(self._config)
        store, ring = resources.open_store(self._config), resources.open_keys(self._config)
        agent_process.ensure(self._config)
        self._send({"phase": "ready"})
        Phases("restore").reach("standby")
        lease_store = leases.open_store(self._config)
        packs = self._directory.dir / "packs"
        unused_store = PrefetchedStore(resources.open_store(self._config), packs)
        try:
            # The heartbeat continues during the prefetch: the source takes silence for a lost connection.
            with PackPrefetch(store, packs, while_waiting=self._send_heartbeat):
                manifest = self._watch(lease_store, PrefetchedStore(store, packs), ring)
        finally:
            lease_store.close()  # it must not be used on both sides of a fork
        self._make_room(manifest, packs)
        chosen = Chosen(manifest, self._this_host.load(self._session))
        return PreparedRestore(criu, chosen, self._prefetched[-1] if self._prefetched else None, unused_store)

    def _make_room(self, manifest: Manifest, packs: Path) -> None:
        """Delete the prefetched packs if the restore would not fit on the disk with them."""
        try:
            image_checks.check_room(self._config.state_dir, manifest)
        except Blocked:
            shutil.rmtree(packs)

    def close(self) -> None:
        """Remove what was prefetched."""
        for image in reversed(self._prefetched):
            image.close()
        self._directory.close()

    def _watch(self, lease_store: LeaseStore, store: Store, ring: KeyRing) -> Manifest:
        """Poll the lease until it is parked at a checkpoint of this migration, and return that. Prefetch the
        checkpoints it names meanwhile."""
        until = clock.boottime() + HAND_OVER_TIMEOUT
        seen: str | None = None
        while (began := clock.boottime()) < until:
            record = self._read_lease(lease_store)
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
                            f"session {self._session[:12]} was parked by another command meanwhile", "It stays parked."
                        )
                    seen = record.checkpoint
                    if ours:
                        self._prefetch(store, ring, manifest)
            self._send_heartbeat()
            time.sleep(max(LEASE_POLL_INTERVAL, took))  # a slow lease store is asked less often
        words = f"session {self._session[:12]} was not handed over within {HAND_OVER_TIMEOUT:.0f} s"
        raise TimedOut(words, "Migrate it again.")

    def _read_lease(self, lease_store: LeaseStore) -> LeaseRecord | None:
        try:
            seen = lease_store.inspect(self._session)
        except Unreachable as error:
            _log.info("the lease store is unreachable: %s", error.message)
            time.sleep(UNREACHABLE_PAUSE)
            return None
        return seen.record if seen else None

    def _prefetch(self, store: Store, ring: KeyRing, manifest: Manifest) -> None:
        """Fetch a checkpoint. Most of its chunks are linked from the one fetched before."""
        image_checks.check_room(self._config.state_dir, manifest)
        where = self._directory.dir / manifest.checkpoint
        before = self._prefetched[-1] if self._prefetched else None
        self._prefetched.append(reader.fetch(store, ring, manifest, where, base=before))
        self._send({"phase": "ahead", "checkpoint": manifest.checkpoint})

    def _send_heartbeat(self) -> None:
        if clock.boottime() - self._told_at > HEARTBEAT_INTERVAL:
            self._send({"phase": "waiting"})

    def _send(self, progress: dict[str, Any]) -> None:
        self._told_at = clock.boottime()
        try:
            self._tell({**progress, "at": self._told_at})
        except OSError as error:
            raise PeerLost("the connection to the migration's source is lost", "Nothing was done here.") from error


class Heartbeat:
    """Send the progress of a restore, and from its first line on a heartbeat every half second, which shows the source
    that this host and the connection are alive.

    The thread starts only with the first line: the restore forks before that, and there must be no thread then."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def say(self, phase: str) -> None:
        """Send the phase that the restore has reached."""
        with self._lock:
            self._tell({"phase": phase, "at": clock.boottime()})
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)
            self._thread.start()

    def _send_heartbeats(self) -> None:
        while not self._over.wait(HEARTBEAT_INTERVAL):
            with self._lock:
                self._tell({"phase": WORKING, "at": clock.boottime()})
