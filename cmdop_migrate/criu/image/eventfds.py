"""Restore the counts of eventfds that have more than 32 bits.

CRIU creates each eventfd with eventfd(2), which takes an unsigned int, so that the upper half of the count is lost.
The whole count is in the image; `complete` adds the upper half before the session runs.

Records of CRIU's images: an eventfd is field 8 of one in files.img, with its id (1) and its count (4). ids-PID.img
names the table of descriptors of a process (2), fdinfo-TABLE.img has the id (1) and the number (4) of each descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.criu.image.files_image import NAME
from cmdop_migrate.criu.protobuf import ImageFile, Malformed
from cmdop_migrate.util import proc

_EVENTFD, _ID, _COUNT, _TABLE, _NUMBER = 8, 1, 4, 2, 4
_LOWER = (1 << 32) - 1
_log = log.get("criu")


def complete(images: Path, pids: Iterable[int]) -> None:
    """Add the missing half to the eventfds of these processes, which CRIU has created and not resumed. Log a count that
    cannot be completed: a restore does not fail because of it."""
    try:
        missing = large(images)
        pids_inside = {proc.inner_pid(pid): pid for pid in pids} if missing else {}
        for pid, number, file in _descriptors(images) if missing else ():
            if file in missing and pid in pids_inside:
                _add(pids_inside[pid], number, missing.pop(file))
    except (Malformed, OSError) as error:
        _log.warning("an eventfd has lost the upper half of its count: %s", error)


def large(images: Path) -> dict[int, int]:
    """Return, by id, the part above 32 bits of each eventfd's count in a checkpoint. Raise Malformed."""
    eventfds = [eventfd for entry in ImageFile(images / NAME).records if (eventfd := entry.inner(_EVENTFD)) is not None]
    counts = {eventfd.number(_ID): eventfd.number(_COUNT) for eventfd in eventfds}
    return {number: count & ~_LOWER for number, count in counts.items() if count > _LOWER}


def _descriptors(images: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (process, number, id of the file) of every descriptor."""
    for path in images.glob("ids-*.img"):
        for ids in ImageFile(path).records:
            table = images / f"fdinfo-{ids.number(_TABLE)}.img"
            for entry in ImageFile(table).records if table.exists() else ():
                yield int(path.stem.removeprefix("ids-")), entry.number(_NUMBER), entry.number(_ID)


def _add(pid: int, number: int, count: int) -> None:
    copy = proc.copy_descriptor(pid, number)
    try:
        os.eventfd_write(copy, count)
    finally:
        os.close(copy)
