"""Detect that this virtual machine was paused, by its real-time clock: often, and once for all sessions of the host.

Each holder checks for itself, so that it does not depend on the agent, but rarely, because there may be many of them. A
pause that is detected here is sent to all of them as doubt: they keep their sessions frozen until a renewal that began
later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.agent.holder_connections import HolderConnections
from cmdop_migrate.util.vm_pause import Pauses

CHECK_EVERY = 0.02  # seconds
_log = log.get("agent")


class PauseWatchdog:
    """Check in a thread of its own: the agent's may be waiting for a lease store that was reachable before the
    pause."""

    def __init__(self, socket: Callable[[str], Path], sessions: Callable[[], Collection[str]]) -> None:
        """Notify holders at `socket`, which returns where a session's holder listens. `sessions`: those that are live
        here; it may be called from any thread."""
        self._sessions = sessions
        self._holders = HolderConnections(socket)
        self._pauses = Pauses()
        self._stopped = threading.Event()
        self._renewed = threading.Event()
        self._found = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pause-watchdog", daemon=True)

    def start(self) -> None:
        if self._pauses.every is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def found(self) -> bool:
        """Tell whether a pause was detected since `renewing`: no holder thaws its session before the next renewal."""
        return self._found.is_set()

    def renewing(self) -> None:
        """Note that all leases are about to be renewed: that handles the pauses detected so far, and short pauses
        before it do not count any more."""
        self._found.clear()
        self._renewed.set()

    def _watch(self) -> None:
        while not self._stopped.wait(CHECK_EVERY):
            sessions = self._sessions()
            if not sessions:
                continue
            if self._renewed.is_set():
                self._renewed.clear()
                self._pauses.renewed()
            if self._pauses.look(at_once=True):
                sent = [self._holders.send(session, op="doubt") for session in sessions]
                self._found.set()
                for session in sessions:
                    self._holders.drop(session)  # rarely needed, and next time other sessions may run here
                _log.warning(
                    "the VM was paused (RTC ahead of CLOCK_BOOTTIME); %d of %d holders notified", sum(sent), len(sent)
                )
