"""Read the terminals of a session from CRIU's images, and change there what CRIU itself could not restore.

`prepare` is for images about to be restored. CRIU makes a restore fail when a
terminal's foreground group has ended, and opens the master of an inner terminal
(tmux, screen) after all processes exist. With `lend` process 1 opens these
masters: that is the process which `criu/sessiontty.py` traces.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cmdop_migrate.criu.imagerecords import ImageFile, Message

INFO, FILES = "tty-info.img", "files.img"
INIT = 1
TTY_FILE = 11  # among CRIU's types of descriptors
PTY, EXTERNAL = 1, 5  # among its types of terminals


class Info:
    """Field numbers of a tty_info_entry."""

    ID, TYPE, LOCKED, SESSION, GROUP, RDEV, TERMIOS, PTY, DEV, UID, GID = 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15


class File:
    """Field numbers of a file_entry, of the tty_file_entry and the reg_file_entry in it, and of an fdinfo_entry."""

    TYPE, ID, REGULAR, TTY = 1, 2, 3, 19
    TTY_ID, TTY_INFO, TTY_REGULAR = 1, 2, 6
    REGULAR_ID, REGULAR_NAME, REGULAR_SIZE, REGULAR_MODE = 1, 6, 8, 10
    FD_ID, FD_FLAGS, FD_TYPE, FD = 1, 2, 3, 4


class _Process:
    PID, GROUP, SESSION = 1, 3, 4


_FILES_ID = 2  # of a task_kobj_ids_entry


@dataclass(frozen=True)
class Terminal:
    """One terminal that is the controlling terminal of a session (in the sense of setsid) inside the tree."""

    index: int  # its name is /dev/pts/INDEX
    leader: int  # the session leader, as the tree numbers its processes
    foreground: int  # the foreground process group


@dataclass(frozen=True)
class Terminals:
    """What has to be known to restore them. `lent`: the descriptors that process 1 holds for that only."""

    terminals: tuple[Terminal, ...] = ()
    lent: range = range(0)


def slave_id(index: int) -> int:
    """The number of the tty_info_entry for /dev/pts/INDEX; that of its master is one more."""
    return index << 1


def prepare(images: Path, lend: bool) -> Terminals:
    """Change the images so that CRIU can restore every terminal. Raises Malformed."""
    if not (images / INFO).exists():
        return Terminals()
    info = ImageFile(images / INFO)
    processes = ImageFile(images / "pstree.img").records
    _name_living_groups(info, processes)
    members = Counter(one.number(_Process.SESSION) for one in processes)
    masters = {one.number(Info.ID) >> 1 for one in info.records if _is_pty(one) and one.number(Info.ID) & 1}
    found, inner = [], []
    for index, entry in sorted(_owned(info).items()):
        leader = entry.number(Info.SESSION)
        one = Terminal(index, leader, entry.number(Info.GROUP))
        if index not in masters:
            found.append(one)
        elif lend and leader != INIT and members[leader] > 1:
            inner.append(one)  # with one member only CRIU does all that is needed
    lent = _lend(images, [one.index for one in inner])
    return Terminals((*found, *(inner if lent else ())), lent)


def _is_pty(entry: Message) -> bool:
    """Not one that was hung up: CRIU keeps no attributes of such a terminal."""
    return entry.number(Info.TYPE) == PTY and entry.content(Info.TERMIOS) is not None


def _owned(info: ImageFile) -> dict[int, Message]:
    """-> index: the entry that knows the session. A master's always does, a slave's if its holder is in the session."""
    entries = sorted((one for one in info.records if _is_pty(one)), key=lambda one: one.number(Info.ID))
    return {one.number(Info.ID) >> 1: one for one in entries if one.number(Info.SESSION)}


def _name_living_groups(info: ImageFile, processes: list[Message]) -> None:
    """Make the leader's group the foreground group where that has ended: TIOCSPGRP would refuse it, and CRIU give up.

    The session's own terminal (it has no master in the tree) always belongs to a session: CRIU refuses it otherwise."""
    groups = {(one.number(_Process.SESSION), one.number(_Process.GROUP)) for one in processes}
    masters = {one.number(Info.ID) >> 1 for one in info.records if one.number(Info.ID) & 1}
    changed = False
    for entry in (one for one in info.records if _is_pty(one)):
        session = entry.number(Info.SESSION)
        if not session and entry.number(Info.ID) >> 1 not in masters:
            session, changed = INIT, True
            entry.set(Info.SESSION, INIT)
        if session and (session, entry.number(Info.GROUP)) not in groups:
            entry.set(Info.GROUP, session)
            changed = True
    if changed:
        info.save()


def _lend(images: Path, indexes: list[int]) -> range:
    """Let process 1 have a descriptor of each of these masters -> their numbers. Of the processes that have a file,
    CRIU has the one with the lowest pid open it."""
    table = descriptor_tables(images).get(INIT)
    if not indexes or table is None:
        return range(0)
    wanted = {slave_id(index) + 1 for index in indexes}
    names = [_tty(one) for one in ImageFile(images / FILES).records]
    ids = [one.number(File.TTY_ID) for one in names if one is not None and one.number(File.TTY_INFO) in wanted]
    if len(ids) != len(indexes):
        return range(0)
    held = ImageFile(table)
    first = max((one.number(File.FD) for one in held.records), default=-1) + 1
    for fd, number in enumerate(ids, first):
        entry = Message()
        for field, value in ((File.FD_ID, number), (File.FD_FLAGS, 1), (File.FD_TYPE, TTY_FILE), (File.FD, fd)):
            entry.set(field, value)
        held.records.append(entry)
    held.save()
    return range(first, first + len(ids))


def _tty(entry: Message) -> Message | None:
    return entry.inner(File.TTY) if entry.number(File.TYPE) == TTY_FILE else None


def descriptor_tables(images: Path) -> dict[int, Path]:
    """-> process, as the tree numbers them: the image with its descriptors."""
    tables = {}
    for path in images.glob("ids-*.img"):
        number = ImageFile(path).records[0].number(_FILES_ID)
        tables[int(path.stem.partition("-")[2])] = images / f"fdinfo-{number}.img"
    return tables
