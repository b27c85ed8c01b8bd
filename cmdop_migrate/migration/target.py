"""The target while it stands by, as the source sees it: one long call in a thread, and what it says meanwhile."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, Protocol

from cmdop_migrate import clock
from cmdop_migrate.errors import PeerFailed, PeerLost
from cmdop_migrate.migration import prefetch

CANCEL_TIMEOUT = 3.0  # it says something every half second
SILENCE = 5.0  # of a host that may be cut off; a longer lease, for slow ones, means more patience


class Target(Protocol):
    """The other host, which shares store, lease store and key with this one (remote/peer.py)."""

    name: str

    def call(
        self,
        *words: str,
        timeout: float | None = None,
        on_line: Callable[[dict[str, Any]], None] | None = None,
        stdin: bytes | None = None,
        on_start: Callable[[Callable[[bytes], None]], None] | None = None,
    ) -> dict[str, Any]:
        """What its CLI answers. Its error is raised; PeerLost when nobody knows how it ended. `on_start` is given what
        writes to its stdin."""


class Receiver:
    """`restore --standby` there. Each of its lines says when it was said, on its clock: the quickest one tells by how
    much that clock differs from ours, and the time it took to come is all that this can be wrong by."""

    def __init__(self, target: Target, words: tuple[str, ...], progress: Callable[[str], None], ttl: float) -> None:
        self._target, self._words, self._progress = target, words, progress
        self._silence = max(SILENCE, ttl / 2)
        self._changed = threading.Condition()
        self._said: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None
        self._failure: BaseException | None = None
        self._cancelled = False
        self._write: Callable[[bytes], None] | None = None
        self._offset = math.inf
        self._heard = clock.boottime()
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)

    def start(self, timeout: float) -> None:
        """Returns when it is ready, and the session may be frozen. Its error, when it cannot be."""
        self._thread.start()
        self._await(lambda: any(one.get("phase") == "ready" for one in self._said), timeout, "get ready")

    def wait_ahead(self, checkpoint: str, timeout: float) -> None:
        """Until it has fetched that checkpoint."""
        self._await(lambda: any(one.get("checkpoint") == checkpoint for one in self._said), timeout, "fetch ahead")

    def name_pack(self, pack: str) -> None:
        """The store has it: it may be fetched. From any thread."""
        write = self._write
        if write is not None and not self._cancelled:
            write(prefetch.pack_line(pack))

    def check(self) -> None:
        """Raises when it does not stand by any more."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
        if self._answer is not None:
            raise PeerFailed(f"{self._target.name} restored something else", "See: cmdop-migrate ls, there.")

    def result(self, timeout: float, is_taken: Callable[[], bool] = lambda: True) -> dict[str, Any]:
        """What `restore` answered there. PeerLost also when it fell silent before it took the session: `is_taken` is
        asked then, and must not wait."""

        quiet, heard, looked = 0.0, self._heard, clock.boottime()

        def watch() -> None:
            nonlocal quiet, heard, looked
            now = clock.boottime()
            # No more than a second at a time: when it was us who slept, what it said meanwhile is still to be read.
            quiet = quiet + min(1.0, now - looked) if self._heard == heard else 0.0
            heard, looked = self._heard, now
            if quiet > self._silence and not is_taken():
                raise PeerLost(f"{self._target.name} has been silent for {quiet:.0f} s", "Is it cut off?")

        self._await(lambda: self._answer is not None, timeout, "answer", watch)
        assert self._answer is not None
        return self._answer

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def here(self, moment: float) -> float:
        """A moment of its clock on ours; rather too late than too early."""
        return moment + self._offset

    def cancel(self) -> None:
        """Nothing is to be restored there: we stop listening at its next word, and it leaves when it finds out. The
        connection may be others' too, and stays."""
        self._cancelled = True
        if self._thread.is_alive():
            self._thread.join(CANCEL_TIMEOUT)

    def _await(
        self, is_there: Callable[[], bool], timeout: float, what: str, watch: Callable[[], None] = lambda: None
    ) -> None:
        until = clock.boottime() + timeout
        with self._changed:
            while not is_there():
                if self._failure is not None:
                    raise self._failure
                if clock.boottime() > until:
                    raise PeerLost(f"{self._target.name} did not {what} within {timeout:.0f} s", "Is it overloaded?")
                watch()
                self._changed.wait(0.5)

    def _run(self) -> None:
        answer: dict[str, Any] | None = None
        failure: BaseException | None = None
        try:
            answer = self._target.call(*self._words, on_line=self._hear, on_start=self._on_start)
        except BaseException as error:  # noqa: BLE001 - a thread's end: whoever waits for it must be told
            failure = error
        with self._changed:
            self._answer, self._failure = answer, failure
            self._changed.notify_all()

    def _on_start(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def _hear(self, line: dict[str, Any]) -> None:
        if self._cancelled:
            raise PeerFailed(f"{self._target.name} is not needed any more", "")
        self._heard = clock.boottime()
        said = line.get("progress")
        if not isinstance(said, dict):
            return
        phase = str(said.get("phase"))
        if isinstance(said.get("at"), float):
            self._offset = min(self._offset, clock.boottime() - said["at"])
        if phase not in ("waiting", "ready", "ahead", "working"):
            self._progress(f"{self._target.name}: {phase}")
        with self._changed:
            self._said.append(said)
            self._changed.notify_all()
