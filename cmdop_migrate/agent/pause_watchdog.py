"""The agent's look at the clock of the board: often, once for all sessions of the host.

Each holder looks for itself, so that it needs no agent; but seldom, for there may be many of them. A pause that is
found here reaches all of them at once, as doubt: they stand still until a renewal that began later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.agent.holder_connections import Lines
from cmdop_migrate.util.vm_pause import Pauses

LOOK_EVERY = 0.02
_log = log.get("agent")


class Vigil:
    """A thread of its own: the agent's may be waiting for a lease store that was there before the pause."""

    def __init__(self, socket: Callable[[str], Path], sessions: Callable[[], Collection[str]]) -> None:
        """`socket`: where a session's holder listens; `sessions`: those that live here, from any thread."""
        self._sessions = sessions
        self._lines = Lines(socket)
        self._pauses = Pauses()
        self._over = threading.Event()
        self._renewed = threading.Event()
        self._found = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vigil", daemon=True)

    def start(self) -> None:
        if self._pauses.every is not None:
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def found(self) -> bool:
        """A pause since `renewing`: no holder lets its session go on before the next renewal."""
        return self._found.is_set()

    def renewing(self) -> None:
        """All leases are about to be renewed: what was found until now is seen to, and short pauses count no more."""
        self._found.clear()
        self._renewed.set()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY):
            sessions = self._sessions()
            if not sessions:
                continue
            if self._renewed.is_set():
                self._renewed.clear()
                self._pauses.renewed()
            if self._pauses.look(at_once=True):
                told = [self._lines.say(session, op="doubt") for session in sessions]
                self._found.set()
                for session in sessions:
                    self._lines.drop(session)  # seldom needed, and the next time others may live here
                _log.warning("this machine stood still without knowing it; %d of %d holders told", sum(told), len(told))
