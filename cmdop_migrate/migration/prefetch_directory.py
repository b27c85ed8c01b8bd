"""Where a target keeps what it fetched before a session comes: STATE_DIR/ahead/SESSION, locked while somebody waits."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from cmdop_migrate.errors import Blocked
from cmdop_migrate.util import locks

LOCK = "lock"
PATIENCE = 1.0  # whoever clears up after others has it for a moment


class Ahead:
    """One session's, for as long as this is open. Blocked when another command waits for the same session."""

    def __init__(self, state_dir: Path, session: str) -> None:
        self.dir = state_dir / "ahead" / session
        until = time.monotonic() + PATIENCE
        while (fd := self._take()) is None:
            if time.monotonic() > until:
                raise Blocked(f"session {session[:12]} is being moved to this host already", "Wait for that.")
            time.sleep(0.02)
        self._fd = fd

    def _take(self) -> int | None:
        """None: another has it, or has just removed it."""
        self.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            return locks.try_take_current(self.dir / LOCK)
        except FileNotFoundError:
            return None

    def close(self) -> None:
        shutil.rmtree(self.dir, ignore_errors=True)
        os.close(self._fd)


def sweep(state_dir: Path) -> bool:
    """Removes what commands that were killed have left. -> whether anybody waits for a session."""
    folder, waits = state_dir / "ahead", False
    for one in folder.iterdir() if folder.is_dir() else ():
        try:
            # Made, where whoever was killed had not come to it, or had removed it first: else it would stay for ever.
            fd = locks.open_file(one / LOCK)
        except OSError:
            continue  # just removed
        if locks.try_lock(fd):
            shutil.rmtree(one, ignore_errors=True)
        else:
            waits = True
        os.close(fd)
    return waits
