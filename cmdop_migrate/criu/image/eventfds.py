"""Restore the counts of eventfds that have more than 32 bits: CRIU creates each with eventfd(2), which takes an
unsigned int, so that the upper half is lost. It is in the image, and is added before the session runs.

Records of CRIU's images: an eventfd is field 8 of one in files.img, with its id (1) and its count (4). ids-PID.img
names the table of descriptors of a process (2), fdinfo-TABLE.img has the id (1) and the number (4) of each descriptor.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.criu.image.files_image import NAME
from cmdop_migrate.criu.image.raw import fields, records
from cmdop_migrate.criu.rpc import Malformed, read_varint

_EVENTFD, _ID, _COUNT, _TABLE, _NUMBER = 8, 1, 4, 2, 4
_LOWER = (1 << 32) - 1
_PIDFD_GETFD = 438  # on every architecture
_log = log.get("criu")


def complete(images: Path, pids: Iterable[int]) -> None:
    """Add what is missing to the eventfds of these processes, which CRIU has made and not resumed. A count that cannot
    be completed is reported in the log: a session does not fail to come back for it."""
    try:
        missing = large(images)
        here = {_inner(pid): pid for pid in pids} if missing else {}
        for pid, number, file in _descriptors(images) if missing else ():
            if file in missing and pid in here:
                _add(here[pid], number, missing.pop(file))
    except (Malformed, OSError, KeyError) as error:
        _log.warning("an eventfd has lost the upper half of its count: %s", error)


def large(images: Path) -> dict[int, int]:
    """Return, by their ids, what the eventfds of a checkpoint count above 32 bits. Raises Malformed."""
    found = {}
    for message in records((images / NAME).read_bytes()):
        for number, _, value in fields(message):
            held = _numbers(value) if number == _EVENTFD else {}
            if held.get(_COUNT, 0) > _LOWER:
                found[held[_ID]] = held[_COUNT] & ~_LOWER
    return found


def _descriptors(images: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (process, number, id of the file) of every descriptor."""
    for path in images.glob("ids-*.img"):
        for message in records(path.read_bytes()):
            table = images / f"fdinfo-{_numbers(message).get(_TABLE)}.img"
            for entry in records(table.read_bytes()) if table.exists() else ():
                held = _numbers(entry)
                yield int(path.stem.removeprefix("ids-")), held[_NUMBER], held[_ID]


def _inner(pid: int) -> int:
    """Return the number of a process in its innermost pid namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid:"))


def _numbers(message: bytes) -> dict[int, int]:
    return {number: read_varint(value, 0)[0] for number, field, value in fields(message) if field[0] & 7 == 0}


def _add(pid: int, number: int, count: int) -> None:
    process = os.pidfd_open(pid)
    try:
        copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, number, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), f"cannot reach descriptor {number} of pid {pid}")
        try:
            os.eventfd_write(copy, count)
        finally:
            os.close(copy)
    finally:
        os.close(process)
