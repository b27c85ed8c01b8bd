"""Prefetch on the target of a migration: fetch packs of an upload that is still under way, and keep what was fetched.

The source names each pack, as a line of JSON on the target's stdin, once the store has it. These names are hints: a
pack that is missing, or was fetched in vain, changes only how long the restore takes.

What a target fetched before the session comes is kept in STATE_DIR/ahead/SESSION, whose lock file is held while a
command waits for the session.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cmdop_migrate import log
from cmdop_migrate.errors import Blocked, CmdopError
from cmdop_migrate.util import locks

if TYPE_CHECKING:  # every command sweeps, and few prefetch: the imports of PackPrefetch take 8 ms
    from concurrent.futures import Future

    from cmdop_migrate.storage.base import Store

PARALLEL = 2  # packs fetched at the same time
LINE_MAX = 1 << 16
CALL_WHILE_WAITING = 0.2  # seconds between two calls of `while_waiting`
LOCK = "lock"
LOCK_TIMEOUT = 1.0  # seconds: a sweep holds the lock for a moment
_log = log.get("prefetch")


class PackPrefetch:
    """Fetch the packs that the source names, in threads, from the start of the block to its end. No thread is left at
    the end of the block, because the caller forks then."""

    def __init__(
        self, store: Store, folder: Path, source: int = 0, while_waiting: Callable[[], None] = lambda: None
    ) -> None:
        """Read names from the file descriptor `source`. At the end of the block, `while_waiting` is called repeatedly
        until the packs being fetched have arrived."""
        from concurrent.futures import ThreadPoolExecutor

        from cmdop_migrate.images.read.prefetched import PackPrefetcher

        self._while_waiting = while_waiting
        self._coming: set[Future[None]] = set()
        self._gatherer = PackPrefetcher(store, folder)
        self._source = source
        self._pool = ThreadPoolExecutor(PARALLEL, "prefetch")
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="prefetch", daemon=True)

    def __enter__(self) -> PackPrefetch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        from concurrent.futures import wait

        os.close(self._wake)
        self._thread.join()
        os.close(self._woken)
        self._pool.shutdown(wait=False, cancel_futures=True)
        try:
            while wait(self._coming, timeout=CALL_WHILE_WAITING).not_done:
                self._while_waiting()
        finally:
            self._pool.shutdown(wait=True)

    def _listen(self) -> None:
        """Read names of packs until end of file, or until the block ends."""
        kept = b""
        try:
            while self._source in select.select([self._source, self._woken], [], [])[0]:
                data = os.read(self._source, LINE_MAX)
                if not data:
                    return
                *lines, kept = (kept + data).split(b"\n")
                for line in lines:
                    self._coming.add(self._pool.submit(self._fetch, line))
                if len(kept) > LINE_MAX:
                    return
        except OSError as error:  # stdin is closed, or cannot be waited for
            _log.info("no names of packs are received: %s", error)

    def _fetch(self, line: bytes) -> None:
        try:
            self._gatherer.bring(json.loads(line)["pack"])
        except (CmdopError, OSError, ValueError, KeyError, TypeError) as error:
            _log.info("a pack was not prefetched: %s", error)


def pack_line(pack: str) -> bytes:
    """Return the line that names a pack to the target."""
    return json.dumps({"pack": pack}).encode() + b"\n"


class PrefetchDirectory:
    """Own the directory of what was prefetched for one session, until `close`. Raises Blocked if another command waits
    for the same session."""

    def __init__(self, state_dir: Path, session: str) -> None:
        self.dir = state_dir / "ahead" / session
        until = time.monotonic() + LOCK_TIMEOUT
        while (fd := self._open_locked()) is None:
            if time.monotonic() > until:
                raise Blocked(f"session {session[:12]} is being moved to this host already", "Wait for that.")
            time.sleep(0.02)
        self._fd = fd

    def _open_locked(self) -> int | None:
        """Return the locked lock file; None if another process holds the lock, or has just removed the directory."""
        self.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            return locks.try_take_current(self.dir / LOCK)
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Remove the directory and release its lock."""
        shutil.rmtree(self.dir, ignore_errors=True)
        os.close(self._fd)


def sweep(state_dir: Path) -> bool:
    """Remove the directories that killed commands have left. Return whether a command waits for a session."""
    folder, is_waiting = state_dir / "ahead", False
    for directory in folder.iterdir() if folder.is_dir() else ():
        try:
            # The lock file is created where the killed command had not created it, or had removed it first: otherwise
            # the directory would stay forever.
            fd = locks.open_file(directory / LOCK)
        except OSError:
            continue  # just removed
        if locks.try_lock(fd):
            shutil.rmtree(directory, ignore_errors=True)
        else:
            is_waiting = True
        os.close(fd)
    return is_waiting
