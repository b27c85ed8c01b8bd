"""Implement the uploader's side of the prune protocol: a mark that says an upload is in progress.

prune.py states the protocol. The mark is written before anything is read, refreshed while the upload runs, and checked
again after the manifest is published: if a prune run took the upload for dead, its packs are checked one by one. Prune
runs use the store's clock, which advances while a virtual machine is paused, unlike the guest's: so this module checks
the store's clock besides our own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection

from cmdop_migrate import log
from cmdop_migrate.clock import boottime
from cmdop_migrate.errors import Unreachable
from cmdop_migrate.images.format import layout
from cmdop_migrate.images.store import deletion_marks
from cmdop_migrate.storage.base import Store

STALE_AFTER = 24 * 3600.0
REFRESHES = 144  # in STALE_AFTER: one every ten minutes
_logger = log.get("images.upload_marks")


class UploadMark:
    """Own `uploads/<checkpoint>`, from `begin` to `end`."""

    def __init__(self, store: Store, session: str, checkpoint: str, stale_after: float = STALE_AFTER) -> None:
        self._store = store
        self._name = layout.upload_name(checkpoint)
        self._body = json.dumps({"session": session, "checkpoint": checkpoint}).encode()
        self._stale_after = stale_after
        self._fresh = 0.0
        self._modified: float | None = None  # by the last answer of the store
        self._lapsed = False
        self._lock = threading.Lock()  # a concurrent refresh could recreate a removed mark
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Write the mark and start refreshing it."""
        self._fresh = boottime()
        self._store.put(self._name, self._body)
        self._thread = threading.Thread(target=self._keep, name="upload-mark", daemon=True)
        self._thread.start()

    def holds(self, packs: Collection[str]) -> bool:
        """Tell whether the packs are safe from every prune run that may not know of this upload."""
        with self._lock:
            if not self._overdue() and self._exists_unbroken():
                return True
        marked = deletion_marks.packs_marked(self._store)  # before presence: prune.py says why
        if marked is None or not marked.isdisjoint(packs):
            return False
        present = {layout.pack_of(info.name) for info in self._store.list(layout.PACKS)}
        return present.issuperset(packs)

    def stop(self) -> None:
        """Stop refreshing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def end(self) -> None:
        """Remove the mark, because the upload was published, or aborted with an index of what it left."""
        self.stop()
        self._store.delete([self._name])

    def _overdue(self) -> bool:
        """Tell whether the mark lapsed: half of its time passed since the start of the last successful refresh, on this
        machine's clock. A mark that lapsed once is never trusted again: a late refresh may have recreated it."""
        if boottime() - self._fresh > self._stale_after / 2:
            self._lapsed = True
        return self._lapsed

    def _exists_unbroken(self) -> bool:
        """Tell whether the mark exists, and always did by the store's clock: a refresh recreates a removed one."""
        info, last = self._store.stat(self._name), self._modified
        if info is None or (last is not None and info.modified - last > self._stale_after / 2):
            self._lapsed = True
        self._modified = info.modified if info is not None else last
        return not self._lapsed

    def _keep(self) -> None:
        while not self._stop.wait(self._stale_after / REFRESHES):
            try:
                with self._lock:
                    if not self._refresh():
                        return
            except Unreachable as error:
                _logger.warning("cannot refresh the mark of this upload: %s", error.message)

    def _refresh(self) -> bool:
        """Rewrite the mark. Return False if it can no longer be trusted."""
        began = boottime()
        if self._overdue() or not self._exists_unbroken():
            return False
        self._store.put(self._name, self._body)
        if boottime() - began > self._stale_after / 2:
            self._lapsed = True
        else:
            self._fresh = began
        return self._exists_unbroken()
