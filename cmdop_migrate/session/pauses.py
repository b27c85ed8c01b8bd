"""Whether the whole machine stood still without its kernel knowing: a virtual machine that was paused, or saved and
put back.

No clock of a guest's kernel counts that time, CLOCK_BOOTTIME neither. The clock of its board does: the hypervisor keeps it
by its own. So both are looked at, again and again, and compared. Stdlib only: the holder loads this.
"""

from __future__ import annotations

import os
import time

BOARD_CLOCK = "/sys/class/rtc/rtc0/since_epoch"
LOOK_EVERY = 0.5
SLACK = 2.5  # the board's clock tells whole seconds, and may be set a little right


class Pauses:
    def __init__(self, path: str = BOARD_CLOCK) -> None:
        self._seen: tuple[int, float] | None = None
        try:
            self._fd: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # this machine's board has no clock: then a pause is noticed at the next renewal, and not before
            self._fd = None

    @property
    def every(self) -> float | None:
        """Seconds between two looks; None when there is nothing to look at."""
        return None if self._fd is None else LOOK_EVERY

    def look(self) -> bool:
        """Since the last look the board's clock went on further than ours. One that was set forward by somebody looks
        the same: the session stands still until its lease is renewed, and goes on."""
        if self._fd is None:
            return False
        try:
            board = int(os.pread(self._fd, 32, 0))
        except (OSError, ValueError):
            return False
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        before, self._seen = self._seen, (board, now)
        return before is not None and (board - before[0]) - (now - before[1]) > SLACK
