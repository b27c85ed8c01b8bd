"""Make CRIU able to dump descriptors of /dev/tty.

CRIU dumps a descriptor of /dev/tty (5:0) only if the terminal's master is in the same process, which is never so. Such
a descriptor is one of /dev/pts/N in everything except its name. So /dev/tty is passed to CRIU as an external terminal,
and CRIU writes it into the images as such. After the dump, while the session is still frozen, the images are changed:
each of these descriptors becomes one of the terminal it refers to. Flags, and which processes share a description, stay
as CRIU wrote them. Nothing is changed in the session itself, however the dump ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from cmdop_migrate.criu.protobuf import ImageFile, Message
from cmdop_migrate.criu.terminal.terminal_images import (
    EXTERNAL,
    FILES,
    INFO,
    PTY,
    TTY_FILE,
    File,
    Info,
    descriptor_tables,
    slave_id,
)
from cmdop_migrate.errors import Blocked
from cmdop_migrate.util import proc

_TIOCGDEV = 0x80045432
_SLAVES = 136  # major number of /dev/pts/N
DEVICE = os.makedev(5, 0)


def external(pids: Iterable[int]) -> tuple[str, ...]:
    """Return every /dev/tty that these processes have open or could open, as values of CRIU's option `external`."""
    devices = set()
    for pid in pids:
        paths = [f"/proc/{pid}/root/dev/tty"]
        try:
            paths += [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue  # it has ended
        for path in paths:
            try:
                status = os.stat(path)
            except OSError:
                continue  # closed since, or no such device exists
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == DEVICE:
                devices.add(f"tty[{status.st_rdev:x}:{status.st_dev:x}]")
    return tuple(sorted(devices))


def resolve(images: Path, pids: Iterable[int]) -> None:
    """Change the images of a dump of these processes, which are still frozen. Raise Blocked or Malformed."""
    if not (images / INFO).exists():
        return
    info = ImageFile(images / INFO)
    external_ids = {entry.number(Info.ID) for entry in info.records if entry.number(Info.TYPE) == EXTERNAL}
    if external_ids:
        _Resolution(images, info, external_ids, pids).run()


class _Resolution:
    def __init__(self, images: Path, info: ImageFile, external_ids: set[int], pids: Iterable[int]) -> None:
        self._info, self._external_ids, self._files = info, external_ids, ImageFile(images / FILES)
        self._holders = _holders(images)
        self._pids = {_inner_pid(pid): pid for pid in pids}
        self._closed: int | None = None  # the index used for all terminals that have been closed
        self._next = max(entry.number(File.ID) for entry in self._files.records) + 1

    def run(self) -> None:
        """Replace the external terminal in every descriptor, and save the images."""
        for entry in list(self._files.records):
            tty = entry.inner(File.TTY) if entry.number(File.TYPE) == TTY_FILE else None
            if tty is None or tty.number(File.TTY_INFO) not in self._external_ids:
                continue
            process, fd = self._holders.get(tty.number(File.TTY_ID), (0, 0))
            pid = self._pids.get(process, 0)
            index = _index(pid, fd)
            if index is None:
                index = self._add_closed()
            tty.set(File.TTY_REGULAR, self._add_path(index, pid))
            tty.set(File.TTY_INFO, slave_id(index))
            entry.set(File.TTY, tty)
            self._describe(index, pid)
        self._info.records = [entry for entry in self._info.records if entry.number(Info.TYPE) != EXTERNAL]
        self._info.save()
        self._files.save()

    def _add_closed(self) -> int:
        """Add a terminal that has been closed, as CRIU describes one: without attributes. Return its index."""
        if self._closed is None:
            used = {entry.number(Info.ID) >> 1 for entry in self._info.records if entry.number(Info.TYPE) == PTY}
            self._closed = index = next(free for free in range(1, len(used) + 2) if free not in used)
            made, name = Message(), Message()
            name.set(1, index)
            made.set(Info.PTY, name)
            for field in (Info.LOCKED, Info.EXCLUSIVE, Info.PACKETS, Info.SESSION, Info.GROUP, Info.UID, Info.GID):
                made.set(field, 0)
            made.set(Info.ID, slave_id(index))
            made.set(Info.TYPE, PTY)
            made.set(Info.RDEV, os.makedev(_SLAVES, index))
            self._info.records.append(made)
        return self._closed

    def _add_path(self, index: int, pid: int) -> int:
        """Add the path by which the terminal is opened, copied from another of its descriptors. Return the path's
        number."""
        paths = {
            tty.number(File.TTY_INFO): tty.number(File.TTY_REGULAR)
            for tty in (entry.inner(File.TTY) for entry in self._files.records if entry.number(File.TYPE) == TTY_FILE)
            if tty is not None and tty.number(File.TTY_REGULAR)
        }
        any_path = next(iter(paths.values()), 0) if index == self._closed else 0
        number = paths.get(slave_id(index), paths.get(slave_id(index) + 1, any_path))
        regulars = [entry for entry in self._files.records if entry.content(File.REGULAR) is not None]
        model = next((entry for entry in regulars if entry.number(File.ID) == number), None)
        regular = model.inner(File.REGULAR) if model is not None else None
        if model is None or regular is None:
            raise _blocked_without_path(pid, index)
        name = (regular.content(File.REGULAR_NAME) or b"").rpartition(b"/")[0] + b"/%d" % index
        regular.set(File.REGULAR_ID, self._next)
        regular.set(File.REGULAR_NAME, name)
        regular.remove(
            File.REGULAR_SIZE, File.REGULAR_MODE
        )  # those of the other path; without them CRIU compares nothing
        made = model.copy()
        made.set(File.ID, self._next)
        made.set(File.REGULAR, regular)
        self._files.records.append(made)
        self._next += 1
        return made.number(File.ID)

    def _describe(self, index: int, pid: int) -> None:
        """Add the terminal's attributes if all its descriptors are of /dev/tty: its master has the same attributes."""
        by_id = {entry.number(Info.ID): entry for entry in self._info.records}
        if slave_id(index) in by_id:
            return
        master = by_id.get(slave_id(index) + 1)
        if master is None:
            raise _blocked_without_path(pid, index)
        made = master.copy()
        owner = os.stat(f"/proc/{pid}/root/dev/pts/{index}")
        name = Message()
        name.set(1, index)
        made.set(Info.PTY, name)
        for field, value in (
            (Info.ID, slave_id(index)),
            (Info.TYPE, PTY),
            (Info.RDEV, owner.st_rdev),
            (Info.LOCKED, 0),
            (Info.PACKETS, 0),
            (Info.UID, owner.st_uid),
            (Info.GID, owner.st_gid),
        ):
            made.set(field, value)
        self._info.records.append(made)


def _index(pid: int, fd: int) -> int | None:
    """Return N if this descriptor of /dev/tty is one of /dev/pts/N, None if that terminal has been closed. Raise
    Blocked if it is neither."""
    try:
        copy = proc.copy_descriptor(pid, fd)
        try:
            (device,) = struct.unpack("I", fcntl.ioctl(copy, _TIOCGDEV, bytes(4)))
        finally:
            os.close(copy)
    except OSError as error:
        if error.errno == errno.EIO:
            return None
        raise _blocked_unknown(pid) from None
    if os.major(device) != _SLAVES:
        raise _blocked_unknown(pid)
    return os.minor(device)


def _blocked_unknown(pid: int) -> Blocked:
    return Blocked(
        f"process {pid} of the session has /dev/tty open, but which terminal that is cannot be determined",
        "The session keeps running. End that process, then checkpoint again.",
    )


def _blocked_without_path(pid: int, index: int) -> Blocked:
    return Blocked(
        f"process {pid} of the session has /dev/tty open, and no process has that terminal open as /dev/pts/{index}",
        "The session keeps running. Start the program from a shell instead of replacing the shell by it (exec).",
    )


def _holders(images: Path) -> dict[int, tuple[int, int]]:
    """Return, by CRIU's id of each open terminal, a process that has it, numbered as in the tree, and its
    descriptor."""
    return {
        entry.number(File.FD_ID): (process, entry.number(File.FD))
        for process, table in descriptor_tables(images).items()
        if table.exists()
        for entry in ImageFile(table).records
        if entry.number(File.FD_TYPE) == TTY_FILE
    }


def _inner_pid(pid: int) -> int:
    try:
        return proc.inner_pid(pid)
    except OSError:
        return 0  # it has ended
