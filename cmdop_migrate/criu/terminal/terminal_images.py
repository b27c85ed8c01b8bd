"""Read the terminals of a session from CRIU's images, and change there what CRIU itself could not restore.

`prepare` is for images about to be restored. CRIU makes a restore fail when a terminal's foreground group has ended,
and opens the master of an inner terminal (tmux, screen) after all processes exist. With `lend` process 1 opens these
masters: that is the process which `criu/terminal/controlling_tty.py` traces.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cmdop_migrate.criu.protobuf import ImageFile, Message

INFO, FILES = "tty-info.img", "files.img"
INIT = 1
TTY_FILE = 11  # among CRIU's types of descriptors
PTY, EXTERNAL = 1, 5  # among its types of terminals


class Info:
    """Field numbers of a tty_info_entry."""

    ID, TYPE, LOCKED, EXCLUSIVE, PACKETS, SESSION, GROUP, RDEV = 1, 2, 3, 4, 5, 6, 7, 8
    TERMIOS, PTY, DEV, UID, GID = 9, 12, 13, 14, 15


class File:
    """Field numbers of a file_entry, of the tty_file_entry and the reg_file_entry in it, and of an fdinfo_entry."""

    TYPE, ID, REGULAR, TTY = 1, 2, 3, 19
    TTY_ID, TTY_INFO, TTY_REGULAR = 1, 2, 6
    REGULAR_ID, REGULAR_NAME, REGULAR_SIZE, REGULAR_MODE = 1, 6, 8, 10
    FD_ID, FD_FLAGS, FD_TYPE, FD = 1, 2, 3, 4


class _Process:
    PID, GROUP, SESSION = 1, 3, 4


_FILES_ID = 2  # of a task_kobj_ids_entry
_TRIES = 32  # masters that CRIU opens at most to have one with a given number
_FEW = 200  # descriptors: no usual limit is below


@dataclass(frozen=True)
class Terminal:
    """Describe one terminal that is the controlling terminal of a session (in the sense of setsid) inside the tree."""

    index: int  # its name is /dev/pts/INDEX
    leader: int  # the session leader, as the tree numbers its processes
    foreground: int  # the foreground process group
    is_own: bool = False  # the session's own, whose master is the holder's
    is_open: bool = True  # there are descriptors of its slave


@dataclass(frozen=True)
class Terminals:
    """Describe the controlling terminals of a session, and the descriptors of process 1 that matter for restoring
    them."""

    terminals: tuple[Terminal, ...] = ()
    lent: range = range(0)  # descriptors that process 1 has for the restore only
    first_free: int = 0  # the number above all descriptors of process 1


def slave_id(index: int) -> int:
    """Return the number of the tty_info_entry for /dev/pts/INDEX; that of its master is one more."""
    return index << 1


def prepare(images: Path, lend: bool) -> Terminals:
    """Change the images so that CRIU can restore every terminal, and return these terminals. Raise Malformed."""
    if not (images / INFO).exists():
        return Terminals()
    info = ImageFile(images / INFO)
    processes = ImageFile(images / "pstree.img").records
    files = [tty for tty in map(_tty, ImageFile(images / FILES).records) if tty is not None]
    opened = {tty.number(File.TTY_INFO) for tty in files}
    _correct_owners(info, processes)
    members = Counter(process.number(_Process.SESSION) for process in processes)
    masters = {entry.number(Info.ID) >> 1 for entry in info.records if _is_pty(entry) and entry.number(Info.ID) & 1}
    own, inner = [], []
    for index, entry in sorted(_owned(info).items()):
        leader = entry.number(Info.SESSION)
        terminal = Terminal(index, leader, entry.number(Info.GROUP), index not in masters, slave_id(index) in opened)
        if terminal.is_own:
            own.append(terminal)
        elif lend and leader != INIT and (members[leader] > 1 or index >= _TRIES or not terminal.is_open):
            inner.append(terminal)  # all other terminals CRIU restores without help
            if not terminal.is_open:  # CRIU would wait forever for a process to open the slave
                entry.set(Info.SESSION, 0)
                entry.set(Info.GROUP, 0)
                info.save()
    table = descriptor_tables(images).get(INIT)
    if table is None:
        return Terminals(tuple(own))
    lent = _lend(table, [terminal.index for terminal in inner], files)
    return Terminals((*own, *inner), lent, max(_numbers(ImageFile(table)), default=-1) + 1)


def _is_pty(entry: Message) -> bool:
    """Tell whether this is a pseudo-terminal that was not hung up: CRIU keeps no attributes of one that was."""
    return entry.number(Info.TYPE) == PTY and entry.content(Info.TERMIOS) is not None


def is_slave_without_master(entry: Message, info: ImageFile) -> bool:
    """Tell whether this is the session's own terminal: its master is the holder's, outside of the tree."""
    number = entry.number(Info.ID)
    return _is_pty(entry) and not number & 1 and all(other.number(Info.ID) != number + 1 for other in info.records)


def _owned(info: ImageFile) -> dict[int, Message]:
    """Return, by index, the entries that name a session. A master's always does, a slave's if the process that has it
    open is in the session."""
    entries = sorted((entry for entry in info.records if _is_pty(entry)), key=lambda entry: entry.number(Info.ID))
    return {entry.number(Info.ID) >> 1: entry for entry in entries if entry.number(Info.SESSION)}


def _correct_owners(info: ImageFile, processes: list[Message]) -> None:
    """Change sessions and foreground groups that CRIU could not restore.

    - The foreground group has ended, so that TIOCSPGRP would refuse it: the leader's group replaces it.
    - The session's own terminal has no session, which CRIU refuses: it is assigned to process 1."""
    groups = {(process.number(_Process.SESSION), process.number(_Process.GROUP)) for process in processes}
    changed = False
    for entry in filter(_is_pty, info.records):
        session = entry.number(Info.SESSION)
        if not session and is_slave_without_master(entry, info):
            session, changed = INIT, True
            entry.set(Info.SESSION, INIT)
        if session and (session, entry.number(Info.GROUP)) not in groups:
            entry.set(Info.GROUP, session)
            changed = True
    if changed:
        info.save()


def _numbers(table: ImageFile) -> set[int]:
    return {entry.number(File.FD) for entry in table.records}


def _lend(table: Path, indexes: list[int], files: list[Message]) -> range:
    """Give process 1 a descriptor of each of these masters, and return their numbers. Of the processes that have a file
    open, CRIU makes the one with the lowest pid open it."""
    if not indexes:
        return range(0)
    by_info = {tty.number(File.TTY_INFO): tty.number(File.TTY_ID) for tty in files}
    ids = [by_info[slave_id(index) + 1] for index in sorted(indexes)]  # in the order in which the kernel assigns them
    held = ImageFile(table)
    first = _free_numbers(_numbers(held), len(ids))
    for fd, number in enumerate(ids, first):
        entry = Message()
        for field, value in ((File.FD_ID, number), (File.FD_FLAGS, 1), (File.FD_TYPE, TTY_FILE), (File.FD, fd)):
            entry.set(field, value)
        held.records.append(entry)
    held.records.sort(key=lambda entry: entry.number(File.FD))
    held.save()
    return range(first, first + len(ids))


def _free_numbers(used: set[int], count: int) -> int:
    """Return the first of `count` consecutive numbers that process 1 does not use: above all that it uses, so that
    files it opens get the numbers it expects; or, if it uses many, in a gap, as its limit (RLIMIT_NOFILE) may be
    near."""
    above = max(used, default=-1) + 1
    if above + count <= _FEW:
        return above
    gaps = (first for first in range(3, above) if used.isdisjoint(range(first, first + count)))
    return next(gaps, above)


def _tty(entry: Message) -> Message | None:
    return entry.inner(File.TTY) if entry.number(File.TYPE) == TTY_FILE else None


def descriptor_tables(images: Path) -> dict[int, Path]:
    """Return, by the pid inside the tree, the image with the descriptors of each process. Raise Malformed."""
    tables = {}
    for path in images.glob("ids-*.img"):
        number = ImageFile(path).records[0].number(_FILES_ID)
        tables[int(path.stem.partition("-")[2])] = images / f"fdinfo-{number}.img"
    return tables
