"""Correct the timerfds in CRIU's list of open files (files.img) so that none expires early.

CRIU records the time left until a timer expires, and the flags it was set with. For a timer set with
TFD_TIMER_ABSTIME the restore adds the whole seconds of its clock to that time. A timer that is not armed (0 left)
becomes one that has expired already, and an armed timer expires up to a second early. Without the flag the same time
left is set unchanged. The flag has one other meaning, and for CLOCK_REALTIME alone: an armed timer follows when the
clock is set. Such a timer keeps the flag and gets one second more, because a timer may expire late but not early.

An entry is a record of files.img; its timer is field 12: clock (4), flags (6), seconds (7) and nanoseconds (8) left.
"""

from __future__ import annotations

from pathlib import Path

from cmdop_migrate.criu.image.files_image import NAME
from cmdop_migrate.criu.protobuf import Message, edit_file, edited

_TIMER, _CLOCK, _FLAGS, _SECONDS, _NANOSECONDS = 12, 4, 6, 7, 8
_ABSOLUTE, _REALTIME = 1, 0


def correct_timers(images: Path) -> None:
    """Rewrite the timers of a checkpoint that is unpacked in `images`. Raise Malformed."""
    if (images / NAME).exists():
        edit_file(images / NAME, corrected)


def corrected(image: bytes) -> bytes:
    """Return the list of open files with its timers corrected. Raise Malformed."""
    return edited(image, _correct)


def _correct(entry: Message) -> None:
    timer = entry.inner(_TIMER)
    if timer is None or not timer.number(_FLAGS) & _ABSOLUTE:
        return
    is_armed = timer.number(_SECONDS) or timer.number(_NANOSECONDS)
    if is_armed and timer.number(_CLOCK, -1) == _REALTIME:
        timer.set(_SECONDS, timer.number(_SECONDS) + 1)
    else:
        timer.set(_FLAGS, timer.number(_FLAGS) & ~_ABSOLUTE)
    entry.set(_TIMER, timer)
