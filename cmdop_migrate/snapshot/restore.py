"""Restore a session from the store.

    choose    resolve the checkpoint; refuse one whose session runs
    fetch     fetch the sealed image and verify every byte; with --lazy only what is needed to start
    files     unpack the session's own files, and install those of its old host that this host lacks
    restore   CRIU restores the process tree as the holder's child, suspended before its first instruction
    adopt     the holder has the terminal, the inputs and the cgroup: only now may the session run   ── running
    memory    the remaining pages arrive while it runs, requested ones first

A failure before `adopt` leaves the checkpoint unchanged and nothing of the
session on this machine. A failure after it, while memory is still arriving,
ends the incarnation: it never keeps running with a page missing.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cmdop_migrate import clock, log
from cmdop_migrate.criu.install.find import Criu
from cmdop_migrate.errors import Unreachable
from cmdop_migrate.holder import start
from cmdop_migrate.host import agent_process, leases, reconcile, references, resources, session_lock
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.read import reader
from cmdop_migrate.images.read.reader import Image
from cmdop_migrate.model import Record, new_session_id, session_name
from cmdop_migrate.session import network
from cmdop_migrate.snapshot import fork_lease, image_checks
from cmdop_migrate.snapshot.rebuild.restore_session import SessionRestore
from cmdop_migrate.snapshot.restore_options import RestoreOptions, RestoreResult
from cmdop_migrate.snapshot.takeover import TakeOver
from cmdop_migrate.storage.base import Store
from cmdop_migrate.util import detached

_log = log.get("restore")


@dataclass(frozen=True)
class PreparedRestore:
    """Hold what a standby target prepared: the CRIU to use, the chosen checkpoint, a prefetched image that shares
    chunks with it, and a store object that was not used yet, because one that was must not be used after a fork."""

    criu: Criu
    chosen: references.Chosen
    prefetched: Image | None
    store: Store


def restore(
    this_host: Host,
    reference: str | None,
    options: RestoreOptions,
    progress: Callable[[str], None] = lambda _: None,
    prepared: PreparedRestore | None = None,
) -> RestoreResult:
    """Restore a session. Return when the session runs and, unless the restore is lazy, has all its memory."""
    agent_process.ensure(this_host.config)

    def work(progress: detached.Progress, answer: detached.Answer) -> None:
        def on_done(result: RestoreResult) -> None:
            answer(result.to_json())

        _Restore(this_host, reference, options, progress, on_done, prepared).run()

    return RestoreResult.from_json(detached.run(work, progress))


class _Restore:
    """Restore one session, in a process of its own, so that Ctrl-C in a terminal does not end it between two pages."""

    def __init__(
        self,
        this_host: Host,
        reference: str | None,
        options: RestoreOptions,
        say: Callable[[str], None],
        answer: Callable[[RestoreResult], None],
        prepared: PreparedRestore | None = None,
    ) -> None:
        self.this_host, self.config = this_host, this_host.config
        self.reference, self.options = reference, options
        self.say, self.answer, self.prepared = say, answer, prepared
        self.phases = resources.Phases("restore")
        self.began = clock.boottime()
        self.session = ""
        self.claimed: network.ClaimedLink | None = None
        self.stall_note: Path | None = None  # the file in which `ls` finds what a running session waits for
        self._stall_lock = threading.Lock()
        self._is_stalled = False

    def run(self) -> None:
        """Choose the checkpoint, fetch it, take the lease and restore the session; `answer` receives the result."""
        criu = self.prepared.criu if self.prepared else resources.find_criu(self.config)
        store = self.prepared.store if self.prepared else resources.open_store(self.config)
        ring = resources.open_keys(self.config)
        with self.phases.phase("choose"):
            host_leases = leases.open_store(self.config)
            current = functools.partial(leases.last_checkpoint, host_leases)
            given = self.prepared.chosen if self.prepared else None
            chosen = given or references.choose(self.this_host, store, ring, self.reference, current)
            if chosen.record is not None and reconcile.is_unwanted(chosen.record):
                reconcile.ask(self.this_host, host_leases, chosen.record)  # an interrupted kill: it is not restored
            if self.options.fork is None:
                references.not_running(chosen)
        record = self._record(chosen)
        lease_takeover = TakeOver(host_leases, store, self.this_host, record, chosen.manifest, self.options.wait)
        if self.options.fork is None:
            lease_takeover.look()
        directory = self.this_host.directory(record.session)
        lock = session_lock.to_restore(self.this_host, record, self.say)
        try:
            record = self._unchanged(chosen, record)
            image = self._fetch(store, ring, chosen.manifest, directory / "image")
            try:
                with self.phases.phase("lease"):
                    initial: Manifest | None = None
                    if self.options.fork is None:
                        lease = lease_takeover.take(self.say)
                    else:
                        lease, initial = fork_lease.begin(
                            self.this_host, host_leases, store, ring, record, chosen.manifest, self.phases.reach
                        )
                        record = replace(record, checkpoint=initial.checkpoint)
                record = replace(record, token=lease.token)
                session_restore: SessionRestore | None = None
                try:
                    # The agent may have exited since the first check; from now on it stays, because we hold the lock.
                    agent_process.ensure(self.config)
                    session_restore = SessionRestore(self, criu, image, record, directory, lock, host_leases, lease)
                    start.remove_files(str(directory), start.OWN)  # files of an earlier incarnation that ended here
                    with agent_process.attended(self.config):
                        session_restore.run()
                except BaseException:
                    if session_restore is None or not session_restore.adopted:
                        if initial is not None:
                            fork_lease.undo(host_leases, store, lease, initial)
                        else:
                            lease_takeover.give_back(lease)
                    raise
            finally:
                image.close()
                for name in ("image", "images"):  # the session has all of it now, or the restore failed
                    shutil.rmtree(directory / name, ignore_errors=True)
        finally:
            os.close(lock)
            self.this_host.sweep()

    def _unchanged(self, chosen: references.Chosen, record: Record) -> Record:
        """Return the record to restore under, read again with the session's lock held: another command may have
        restored the session, and it may have ended, since it was chosen. Raises Fenced if it runs."""
        now = self.this_host.load(record.session)
        if self.options.fork is not None or now == chosen.record or now is None or now.phase == "restoring":
            return record
        chosen_now = replace(chosen, record=now)
        references.not_running(chosen_now)
        return self._record(chosen_now)

    def _fetch(self, store: Store, ring: KeyRing, manifest: Manifest, where: Path) -> Image:
        image_checks.check_room(self.config.state_dir, manifest)
        with self.phases.phase("fetch"):
            self.say("fetching")
            if self.options.lazy:
                return reader.fetch_lazy(store, ring, manifest, where, self._stalled)
            prefetched = self.prepared.prefetched if self.prepared else None
            return reader.fetch(store, ring, manifest, where, base=prefetched)

    def _record(self, chosen: references.Chosen) -> Record:
        """Return the record that the restored session will have."""
        manifest, own = chosen.manifest, chosen.record
        before = image_checks.record(manifest)
        link = before.link
        if self.claimed is not None:
            self.claimed.release()
        if link is not None:  # the claim lasts until this process ends, which is after CRIU created the interface
            self.claimed = network.claim(link) or network.choose(self.config.subnet)
            link = self.claimed.link
        kept = replace(
            before,
            host=self.config.host,
            phase="live",
            checkpoint=manifest.checkpoint,
            link=link,
            exit=None,
            pid=None,
        )
        if self.options.fork is None:
            if own is not None and own.session != manifest.session:  # a fork parked at its parent's checkpoint
                kept = replace(kept, session=own.session, name=own.name, parent=own.parent, created=own.created)
            return kept
        return replace(
            kept,
            session=new_session_id(),
            name=session_name(self.options.fork),
            parent=manifest.session,
            created=clock.walltime(),
        )

    def _stalled(self, seconds: float, error: Unreachable | None) -> None:
        """Report that the store is unreachable, or (`error` is None) that it answers again: to the command, the log,
        `ls` and the events."""
        if error is not None:
            self.say(f"waiting for the store since {seconds:.0f} s: {error.message}")
            _log.warning("the store has been unreachable for %.0f s: %s", seconds, error.message)
        with self._stall_lock:  # several threads may wait for the store, and call this simultaneously
            if self.stall_note is None or (error is not None) == self._is_stalled:
                return  # the session does not run yet; or nothing changed
            self._is_stalled = error is not None
            try:
                self._note_stall(self.stall_note, seconds, error)
            except OSError as write_error:  # a full disk: no reason to end a session that only waits
                _log.warning("the stall cannot be recorded: %s", write_error)

    def _note_stall(self, note: Path, seconds: float, error: Unreachable | None) -> None:
        if error is not None:
            note.write_text(f"waits for the store: {error.message}")
            self.this_host.events.emit("memory_stalled", self.session, reason=error.message)
        else:
            note.unlink(missing_ok=True)
            self.this_host.events.emit("memory_going_on", self.session, after_s=round(seconds, 3))
