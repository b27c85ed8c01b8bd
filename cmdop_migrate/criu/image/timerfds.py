"""Correct the timerfds in CRIU's list of open files (files.img) so that none fires before its time.

CRIU writes down how long a timer has to run, and which flags it was set with. For one set with TFD_TIMER_ABSTIME the
restore adds the whole seconds of its clock to that. A timer that is not armed (0 to run) becomes one that has expired
already, and an armed one fires up to a second early. Without the flag the same time to run is set as it is. The flag
has one other meaning, and for CLOCK_REALTIME alone: an armed timer follows when the clock is set. Such a timer keeps
it, and runs a second longer, for a timer may fire late but not early.

An entry is a record of files.img; its timer is field 12: clock (4), flags it was set with (6), seconds (7) and
nanoseconds (8) to run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cmdop_migrate.criu.image.files_image import NAME
from cmdop_migrate.criu.image.raw import bytes_field, fields, number_field, records, with_records
from cmdop_migrate.criu.rpc import read_varint

_TIMER, _CLOCK, _FLAGS, _SECONDS, _NANOSECONDS = 12, 4, 6, 7, 8
_ABSOLUTE, _REALTIME = 1, 0


def correct_timers(images: Path) -> None:
    """Rewrite the timers of a checkpoint that is laid out in `images`. Raises Malformed."""
    image = images / NAME
    if not image.exists():
        return
    before = image.read_bytes()
    after = corrected(before)
    if after != before:
        image.write_bytes(after)


def corrected(image: bytes) -> bytes:
    """Return the list of open files with its timers corrected. Raises Malformed."""
    return with_records(image, (b"".join(_entry(message)) for message in records(image)))


def _entry(message: bytes) -> Iterator[bytes]:
    for number, field, value in fields(message):
        if number == _TIMER:
            timer = b"".join(_timer(value))
            yield bytes_field(_TIMER, timer)
        else:
            yield field


def _timer(message: bytes) -> Iterator[bytes]:
    held = {number: read_varint(value, 0)[0] for number, field, value in fields(message) if field[0] & 7 == 0}
    is_absolute = held.get(_FLAGS, 0) & _ABSOLUTE
    is_armed = held.get(_SECONDS, 0) or held.get(_NANOSECONDS, 0)
    changed = {}
    if is_absolute and is_armed and held.get(_CLOCK) == _REALTIME:
        changed[_SECONDS] = held.get(_SECONDS, 0) + 1
    elif is_absolute:
        changed[_FLAGS] = held[_FLAGS] & ~_ABSOLUTE
    for number, field, _ in fields(message):
        yield number_field(number, changed[number]) if number in changed else field
