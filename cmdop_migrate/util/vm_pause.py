"""Whether the whole machine stood still without its kernel knowing: a virtual machine that was paused, or saved and
put back.

No clock of a guest's kernel counts that time, CLOCK_BOOTTIME neither. The clock of its board does: the hypervisor keeps
it by its own. So both are looked at, again and again, and compared. Stdlib only: the holder loads this.
"""

from __future__ import annotations

import os
import time

BOARD_CLOCK = "/sys/class/rtc/rtc0/since_epoch"
LOOK_EVERY = 0.2
AT_MOST_EVERY = 0.05  # however many clients say something: a look takes a real board's clock up to some ms
SLACK = 2.5  # the board's clock tells whole seconds, and may be set a little right


def is_virtual(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """No machine of metal is paused without knowing; and its board's clock is slow to read."""
    try:
        with open(cpuinfo, "rb") as file:
            said = file.read(8192)
    except OSError:
        return True
    return b" hypervisor" in said or b"\nflags" not in said  # only x86 says so; the others are taken for one


class Pauses:
    """Of one thread at a time."""

    def __init__(self, path: str = BOARD_CLOCK) -> None:
        self._base = self._last = self._looked = 0.0
        self._fd = _open(path)

    @property
    def every(self) -> float | None:
        """Seconds between two looks; None when there is nothing to look at."""
        return None if self._fd is None else LOOK_EVERY

    def look(self, at_once: bool = False) -> bool:
        """Since the last renewal the board's clock went on further than ours, by all pauses together. One that was set
        forward by somebody looks the same: the session stands still until its lease is renewed, and goes on.
        `at_once`: however recent the last look is."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._fd is None or (now - self._looked < AT_MOST_EVERY and not at_once):
            return False
        try:
            ahead = int(os.pread(self._fd, 32, 0)) - now
        except (OSError, ValueError):
            return False
        is_first, self._looked, self._last = not self._looked, now, ahead
        paused = not is_first and ahead - self._base > SLACK
        self._base = ahead if is_first or paused else min(self._base, ahead)
        return paused

    def renewed(self) -> None:
        """What was before counts no more. As of the last look: a pause since then is still to be found."""
        self._base = self._last


def _open(path: str) -> int | None:
    """None: this machine's board has no clock. Then a pause is noticed at the next renewal, and not before."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC) if is_virtual() else None
    except OSError:
        return None
