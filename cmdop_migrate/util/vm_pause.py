"""Detect that the whole machine was paused without its kernel knowing: a virtual machine that was paused, or saved and
restored.

No clock of a guest's kernel counts that time, not even CLOCK_BOOTTIME. The
real-time clock of the board does, because the hypervisor keeps it. So both clocks
are read repeatedly and compared. Standard library only: the holder imports this.
"""

from __future__ import annotations

import os
import time

BOARD_CLOCK = "/sys/class/rtc/rtc0/since_epoch"
COMPARE_CLOCKS_EVERY = 0.2  # seconds
READ_AT_MOST_EVERY = 0.05  # however many requests arrive: reading a real board's clock takes up to some ms
SLACK = 2.5  # seconds: the board's clock has whole seconds, and may be adjusted a little


def is_virtual(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Return whether this is a virtual machine. A physical one is never paused unnoticed, and its clock is slow to
    read."""
    try:
        with open(cpuinfo, "rb") as file:
            said = file.read(8192)
    except OSError:
        return True
    return b" hypervisor" in said or b"\nflags" not in said  # only x86 tells; other machines are taken for virtual ones


class Pauses:
    """Compare the two clocks. Not for several threads simultaneously."""

    def __init__(self, path: str = BOARD_CLOCK) -> None:
        self._base = self._last = self._looked = 0.0
        self._fd = _open(path)

    @property
    def every(self) -> float | None:
        """Return the seconds between two looks; None if there is no such clock."""
        return None if self._fd is None else COMPARE_CLOCKS_EVERY

    def look(self, at_once: bool = False) -> bool:
        """Return whether the board's clock has advanced further than the kernel's since the last renewal, by all pauses
        together. An administrator who sets that clock forward looks the same: the session is frozen until its lease is
        renewed, and then resumes. `at_once`: look however recent the last look is."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._fd is None or (now - self._looked < READ_AT_MOST_EVERY and not at_once):
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
        """Forget the pauses before the last look; one since then is still to be found."""
        self._base = self._last


def _open(path: str) -> int | None:
    """Open the board's clock. None: this machine has none; then a pause is noticed at the next renewal, and not
    earlier."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC) if is_virtual() else None
    except OSError:
        return None
