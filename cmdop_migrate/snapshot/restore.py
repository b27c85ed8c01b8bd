"""Bring a session back from the store.

    choose    which checkpoint; not one whose session runs
    fetch     all of it, sealed, every byte verified; with --lazy only what is needed to begin
    files     the session's own files, and those of its old host that this one lacks
    restore   CRIU makes the tree anew, as the holder's child; it stands still before its first instruction
    adopt     the holder has terminal, inputs and cgroup: only now may it run          ── running
    memory    pages come behind it, on demand first

A failure before `adopt` leaves the checkpoint as it was and this machine clean.
One after it, while memory is still coming, ends the incarnation: it never runs
on with a page missing.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from cmdop_migrate.snapshot.rebuild.restore_session import Incarnation, Wanted
from cmdop_migrate.snapshot.takeover import TakeOver
from cmdop_migrate.storage.base import Store
from cmdop_migrate.util import detached

_log = log.get("restore")


@dataclass(frozen=True)
class Known:
    """What was found out beforehand: the CRIU to use, what is to be restored, an image that shares chunks with it; and
    the store, which nobody has used yet, so that it may be used after a fork."""

    criu: Criu
    chosen: references.Chosen
    ahead: Image | None
    store: Store


def restore(
    this_host: Host,
    reference: str | None,
    wanted: Wanted,
    progress: Callable[[str], None] = lambda _: None,
    known: Known | None = None,
) -> dict[str, Any]:
    """What `restore --json` answers, once the session runs and, unless lazy, has all its memory."""
    agent_process.ensure(this_host.config)
    return detached.run(lambda say, answer: _Restore(this_host, reference, wanted, say, answer, known).run(), progress)


class _Restore:
    """Runs in a process of its own, so that nobody's Ctrl-C ends it between two pages."""

    def __init__(
        self,
        this_host: Host,
        reference: str | None,
        wanted: Wanted,
        say: detached.Progress,
        answer: detached.Answer,
        known: Known | None = None,
    ) -> None:
        self.this_host, self.config = this_host, this_host.config
        self.reference, self.wanted = reference, wanted
        self.say, self.answer, self.known = say, answer, known
        self.phases = resources.Phases("restore")
        self.began = clock.boottime()
        self.session = ""
        self.claimed: network.ClaimedLink | None = None
        self.stall: Path | None = None  # where `ls` finds what a session that runs already waits for
        self._telling = threading.Lock()
        self._is_stalled = False

    def run(self) -> None:
        criu = self.known.criu if self.known else resources.find_criu(self.config)
        store = self.known.store if self.known else resources.open_store(self.config)
        ring = resources.open_keys(self.config)
        with self.phases.phase("choose"):
            host_leases = leases.open_store(self.config)
            current = functools.partial(leases.last_checkpoint, host_leases)
            given = self.known.chosen if self.known else None
            chosen = given or references.choose(self.this_host, store, ring, self.reference, current)
            if chosen.record is not None and reconcile.is_unwanted(chosen.record):
                reconcile.ask(self.this_host, host_leases, chosen.record)  # a kill was cut off: it is not brought back
            if self.wanted.fork is None:
                references.not_running(chosen)
        record = self._record(chosen)
        over = TakeOver(host_leases, store, self.this_host, record, chosen.manifest, self.wanted.wait)
        if self.wanted.fork is None:
            over.look()
        directory = self.this_host.directory(record.session)
        lock = session_lock.to_restore(self.this_host, record, self.say)
        try:
            record = self._unchanged(chosen, record)
            image = self._fetch(store, ring, chosen.manifest, directory / "image")
            try:
                with self.phases.phase("lease"):
                    born: Manifest | None = None
                    if self.wanted.fork is None:
                        lease = over.take(self.say)
                    else:
                        lease, born = fork_lease.begin(
                            self.this_host, host_leases, store, ring, record, chosen.manifest, self.phases.reach
                        )
                        record = replace(record, checkpoint=born.checkpoint)
                record = replace(record, token=lease.token)
                incarnation: Incarnation | None = None
                try:
                    agent_process.ensure(
                        self.config
                    )  # it may have left since we looked; now it stays: we have the lock
                    incarnation = Incarnation(self, criu, image, record, directory, lock, host_leases, lease)
                    start.remove_files(str(directory), start.OWN)  # what one that ended here had changed
                    with agent_process.attended(self.config):
                        incarnation.run()
                except BaseException:
                    if incarnation is None or not incarnation.adopted:
                        fork_lease.undo(host_leases, store, lease, born) if born is not None else over.give_back(lease)
                    raise
            finally:
                image.close()
                for name in ("image", "images"):  # all of it is in the session now, or of no use
                    shutil.rmtree(directory / name, ignore_errors=True)
        finally:
            os.close(lock)
            self.this_host.sweep()

    def _unchanged(self, chosen: references.Chosen, record: Record) -> Record:
        """With the session's lock held: another may have restored it, and it may have ended, since we looked."""
        now = self.this_host.load(record.session)
        if self.wanted.fork is not None or now == chosen.record or now is None or now.phase == "restoring":
            return record
        again = replace(chosen, record=now)
        references.not_running(again)
        return self._record(again)

    def _fetch(self, store: Store, ring: KeyRing, manifest: Manifest, where: Path) -> Image:
        image_checks.check_room(self.config.state_dir, manifest)
        with self.phases.phase("fetch"):
            self.say("fetching")
            if self.wanted.lazy:
                return reader.fetch_lazy(store, ring, manifest, where, self._stalled)
            ahead = self.known.ahead if self.known else None
            return reader.fetch(store, ring, manifest, where, base=ahead)

    def _record(self, chosen: references.Chosen) -> Record:
        """The record the restored session will have."""
        manifest, own = chosen.manifest, chosen.record
        before = image_checks.record(manifest)
        link = before.link
        if self.claimed is not None:
            self.claimed.release()
        if link is not None:  # claimed until this process ends, which is after CRIU created the interface
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
        if self.wanted.fork is None:
            if own is not None and own.session != manifest.session:  # a branch parked at its parent's checkpoint
                kept = replace(kept, session=own.session, name=own.name, parent=own.parent, created=own.created)
            return kept
        return replace(
            kept,
            session=new_session_id(),
            name=session_name(self.wanted.fork),
            parent=manifest.session,
            created=clock.walltime(),
        )

    def _stalled(self, seconds: float, error: Unreachable | None) -> None:
        """The store is away, or (None) answers again. Told where a person looks: the command, the log, `ls`, events."""
        if error is not None:
            self.say(f"waiting for the store since {seconds:.0f} s: {error.message}")
            _log.warning("the store is away since %.0f s: %s", seconds, error.message)
        with self._telling:  # several may wait for it at once, and hear it at once
            if self.stall is None or (error is not None) == self._is_stalled:
                return  # nobody runs yet who could be stalled; or nothing new
            self._is_stalled = error is not None
            try:
                self._note_stall(self.stall, seconds, error)
            except OSError as trouble:  # a full disk: no reason to end what only waits
                _log.warning("that it waits, or not, is not on record: %s", trouble)

    def _note_stall(self, note: Path, seconds: float, error: Unreachable | None) -> None:
        if error is not None:
            note.write_text(f"waits for the store: {error.message}")
            self.this_host.events.emit("memory_stalled", self.session, reason=error.message)
        else:
            note.unlink(missing_ok=True)
            self.this_host.events.emit("memory_going_on", self.session, after_s=round(seconds, 3))
