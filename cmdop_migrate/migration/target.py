"""Drive the standby target of a migration from the source: one long call in a thread, and its progress lines."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, Protocol

from cmdop_migrate import clock
from cmdop_migrate.errors import PeerFailed, PeerLost
from cmdop_migrate.migration import prefetch
from cmdop_migrate.snapshot.restore_options import RestoreResult

CANCEL_TIMEOUT = 3.0  # the target sends a heartbeat every half second
SILENCE_TIMEOUT = 5.0  # seconds without a heartbeat after which a target may be cut off; longer with a long lease TTL


class RemoteHost(Protocol):
    """Describe another host that shares store, lease store and key with this one (remote/peer.py)."""

    name: str

    def call(
        self,
        *words: str,
        timeout: float | None = None,
        on_line: Callable[[dict[str, Any]], None] | None = None,
        stdin: bytes | None = None,
        on_start: Callable[[Callable[[bytes], None]], None] | None = None,
    ) -> dict[str, Any]:
        """Run a command there and return its JSON. Raises its error, or PeerLost if its outcome is unknown. `on_line`
        receives each progress line; `on_start` receives a function that writes to the command's stdin."""


class TargetStandby:
    """Run `restore --standby` on the target.

    Each progress line has the time it was sent, by the target's clock: the line that arrived quickest gives the offset
    between the two clocks, with an error of at most the time it took to arrive."""

    def __init__(self, target: RemoteHost, words: tuple[str, ...], progress: Callable[[str], None], ttl: float) -> None:
        self._target, self._words, self._progress = target, words, progress
        self._silence_timeout = max(SILENCE_TIMEOUT, ttl / 2)
        self._changed = threading.Condition()
        self._progress_lines: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None
        self._failure: BaseException | None = None
        self._cancelled = False
        self._write: Callable[[bytes], None] | None = None
        self._offset = math.inf
        self._heard_at = clock.boottime()
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)

    def start(self, timeout: float) -> None:
        """Start the call, and wait until the target is ready and the session may be frozen. Raises the target's
        error."""
        self._thread.start()
        self._await(lambda: any(line.get("phase") == "ready" for line in self._progress_lines), timeout, "get ready")

    def wait_prefetched(self, checkpoint: str, timeout: float) -> None:
        """Wait until the target has prefetched a checkpoint."""

        def is_prefetched() -> bool:
            return any(line.get("checkpoint") == checkpoint for line in self._progress_lines)

        self._await(is_prefetched, timeout, "prefetch")

    def name_pack(self, pack: str) -> None:
        """Tell the target that the store has a pack, so that it may prefetch it. May be called from any thread."""
        write = self._write
        if write is not None and not self._cancelled:
            write(prefetch.pack_line(pack))

    def check(self) -> None:
        """Raise an error if the target no longer stands by."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
        if self._answer is not None:
            raise PeerFailed(f"{self._target.name} restored something else", "See: cmdop-migrate ls, there.")

    def result(self, timeout: float, is_taken: Callable[[], bool] = lambda: True) -> RestoreResult:
        """Wait for the result of the restore there. Raises PeerLost also if the target sent nothing for a while and has
        not taken the session's lease: `is_taken` is called then, and must not wait."""

        silent_s, heard_at, looked_at = 0.0, self._heard_at, clock.boottime()

        def watch() -> None:
            nonlocal silent_s, heard_at, looked_at
            now = clock.boottime()
            # Count one second at most: if this process was suspended, lines that arrived meanwhile are still unread.
            silent_s = silent_s + min(1.0, now - looked_at) if self._heard_at == heard_at else 0.0
            heard_at, looked_at = self._heard_at, now
            if silent_s > self._silence_timeout and not is_taken():
                raise PeerLost(f"{self._target.name} has been silent for {silent_s:.0f} s", "Is it cut off?")

        self._await(lambda: self._answer is not None, timeout, "answer", watch)
        assert self._answer is not None
        return RestoreResult.from_json(self._answer)

    @property
    def is_alive(self) -> bool:
        """Return whether the call to the target is still under way."""
        return self._thread.is_alive()

    def here(self, moment: float) -> float:
        """Convert a time of the target's clock to this host's clock; the result may be too late, never too early."""
        return moment + self._offset

    def cancel(self) -> None:
        """Cancel the restore: the call ends at the next progress line, and the target exits when it cannot send any
        more. The connection stays, because other calls may use it."""
        self._cancelled = True
        if self._thread.is_alive():
            self._thread.join(CANCEL_TIMEOUT)

    def _await(
        self, is_done: Callable[[], bool], timeout: float, what: str, watch: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until `is_done`, and call `watch` meanwhile. Raises the call's error, or PeerLost after `timeout`."""
        until = clock.boottime() + timeout
        with self._changed:
            while not is_done():
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
            answer = self._target.call(*self._words, on_line=self._on_line, on_start=self._on_start)
        except BaseException as error:  # noqa: BLE001 - the thread ends: `_await` raises the error
            failure = error
        with self._changed:
            self._answer, self._failure = answer, failure
            self._changed.notify_all()

    def _on_start(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def _on_line(self, line: dict[str, Any]) -> None:
        if self._cancelled:
            raise PeerFailed(f"the restore on {self._target.name} was cancelled", "")
        self._heard_at = clock.boottime()
        progress = line.get("progress")
        if not isinstance(progress, dict):
            return
        phase = str(progress.get("phase"))
        if isinstance(progress.get("at"), float):
            self._offset = min(self._offset, clock.boottime() - progress["at"])
        if phase not in ("waiting", "ready", "ahead", "working"):
            self._progress(f"{self._target.name}: {phase}")
        with self._changed:
            self._progress_lines.append(progress)
            self._changed.notify_all()
