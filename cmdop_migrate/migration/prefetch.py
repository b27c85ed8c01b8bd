"""The packs of an upload that is under way, brought to the target while the source still sends the others.

The source names each pack, a line of JSON on our stdin, once the store has it. A hint and no more: what is missing, or
was brought in vain, changes nothing but how long it takes.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.errors import CmdopError
from cmdop_migrate.images.read.prefetched import PackPrefetcher
from cmdop_migrate.storage.base import Store

PARALLEL = 2
LINE_MAX = 1 << 16
WAIT = 0.2
_log = log.get("gather")


class Gathering:
    """From `with` to its end, in threads; afterwards there is none of them left: its caller forks."""

    def __init__(
        self, store: Store, folder: Path, source: int = 0, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """`meanwhile` is called again and again while it waits, at the end, for what is on its way."""
        self._meanwhile = meanwhile
        self._coming: set[Future[None]] = set()
        self._gatherer = PackPrefetcher(store, folder)
        self._source = source
        self._pool = ThreadPoolExecutor(PARALLEL, "gather")
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="gather", daemon=True)

    def __enter__(self) -> Gathering:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._wake)
        self._thread.join()
        os.close(self._woken)
        self._pool.shutdown(wait=False, cancel_futures=True)
        try:
            while wait(self._coming, timeout=WAIT).not_done:
                self._meanwhile()
        finally:
            self._pool.shutdown(wait=True)

    def _listen(self) -> None:
        """Until the end of what it reads, or of us."""
        kept = b""
        try:
            while self._source in select.select([self._source, self._woken], [], [])[0]:
                data = os.read(self._source, LINE_MAX)
                if not data:
                    return
                *lines, kept = (kept + data).split(b"\n")
                for line in lines:
                    self._coming.add(self._pool.submit(self._bring, line))
                if len(kept) > LINE_MAX:
                    return
        except OSError as error:  # no stdin at all, or one that cannot be waited for
            _log.info("nobody names packs: %s", error)

    def _bring(self, line: bytes) -> None:
        try:
            self._gatherer.bring(json.loads(line)["pack"])
        except (CmdopError, OSError, ValueError, KeyError, TypeError) as error:
            _log.info("a pack was not brought ahead: %s", error)


def name_of(pack: str) -> bytes:
    """The line that names it."""
    return json.dumps({"pack": pack}).encode() + b"\n"
