"""The uploader's side of the prune protocol: a mark that says an upload is under way.

retention.py states the protocol. Here: the mark is written before anything is
read, refreshed while the upload lives, and looked at again after the manifest
is published: if a pruner took it for dead, the packs are checked one by one.
Pruners go by the store's clock, which goes on while a virtual machine is
paused and knows nothing of it: so do we, besides our own.
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
REFRESHES = 144  # in that time: one every ten minutes
_logger = log.get("images.uploads")


class UploadMark:
    """`uploads/<checkpoint>`, from `begin` to `end`."""

    def __init__(self, store: Store, session: str, checkpoint: str, stale_after: float = STALE_AFTER) -> None:
        self._store = store
        self._name = layout.upload_name(checkpoint)
        self._body = json.dumps({"session": session, "checkpoint": checkpoint}).encode()
        self._stale_after = stale_after
        self._fresh = 0.0
        self._modified: float | None = None  # as the store told it last
        self._lapsed = False
        self._lock = threading.Lock()  # a mark that is being refreshed may be there for the wrong reason
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._fresh = boottime()
        self._store.put(self._name, self._body)
        self._thread = threading.Thread(target=self._keep, name="upload-mark", daemon=True)
        self._thread.start()

    def holds(self, packs: Collection[str]) -> bool:
        """Whether the packs are safe from every prune run that may not know of this upload."""
        with self._lock:
            if not self._overdue() and self._stands():
                return True
        doomed = deletion_marks.doomed_packs(self._store)  # before presence: retention.py says why
        if doomed is None or not doomed.isdisjoint(packs):
            return False
        present = {layout.pack_of(info.name) for info in self._store.list(layout.PACKS)}
        return present.issuperset(packs)

    def stop(self) -> None:
        """No more refreshing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def end(self) -> None:
        """The upload is over: published, or given up with an index of what it left."""
        self.stop()
        self._store.delete([self._name])

    def _overdue(self) -> bool:
        """Counted from the start of the last refresh that worked, on this machine's own clock, with a half to spare. A
        mark that lapsed once is never trusted again: a late refresh may have written it anew."""
        if boottime() - self._fresh > self._stale_after / 2:
            self._lapsed = True
        return self._lapsed

    def _stands(self) -> bool:
        """Whether it is there, and was all the time by the store's clock: a refresh writes anew what was removed."""
        found, last = self._store.stat(self._name), self._modified
        if found is None or (last is not None and found.modified - last > self._stale_after / 2):
            self._lapsed = True
        self._modified = found.modified if found is not None else last
        return not self._lapsed

    def _keep(self) -> None:
        while not self._stop.wait(self._stale_after / REFRESHES):
            try:
                with self._lock:
                    if not self._refresh():
                        return
            except Unreachable as error:
                _logger.warning("the mark of this upload could not be refreshed: %s", error.message)

    def _refresh(self) -> bool:
        """False: it is not to be trusted any more."""
        began = boottime()
        if self._overdue() or not self._stands():
            return False
        self._store.put(self._name, self._body)
        if boottime() - began > self._stale_after / 2:
            self._lapsed = True
        else:
            self._fresh = began
        return self._stands()
