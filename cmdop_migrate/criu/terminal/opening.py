"""Open the terminals of a restored session in its process 1, and hand their masters to CRIU."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable

from cmdop_migrate import log
from cmdop_migrate.criu.ptrace import NO_CALL, Ended, Registers, Task, make_again
from cmdop_migrate.criu.terminal import terminal_images
from cmdop_migrate.criu.terminal.terminal_images import Terminals
from cmdop_migrate.criu.terminal.tracing import Root

_log = log.get("criu")
_WRITE, _CLOSE, _IOCTL, _FCNTL, _OPENAT = 1, 3, 16, 72, 257
_FORKS = (56, 57, 58, 435)
_TIOCSCTTY, _TIOCSPGRP, _TIOCSPTLCK, _TIOCGPTN = 0x540E, 0x5410, 0x40045431, 0x80045430
_F_SETFL, _F_DUPFD_CLOEXEC = 4, 1030
_AT_FDCWD = -100
_FLAGS = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
_SPARE = 16  # numbers that CRIU leaves free between the descriptors of a process and its own
_ANNOUNCED = re.compile(rb"tty: open driver \S+ id \S+ index (\d+) ")  # in CRIU's log
MOST_CALLS = 200_000  # system calls that are followed; some hundreds are usual


class Opening:
    """Follow the root task from its first fork until CRIU has opened every terminal in it."""

    def __init__(self, root: Root, known: Terminals) -> None:
        self._root, self._known = root, {tty.index: tty for tty in known.terminals}
        self._first = known.first_free
        self._masters: dict[int, int] = {}  # index: descriptor in the root
        self._slaves: dict[int, int] = {}  # index: descriptor of a slave that CRIU has not opened yet
        self._left = set(self._known)  # terminals that CRIU has not opened yet
        self._taken: set[int] = set()  # masters that CRIU has
        self._offered: list[int] = []  # masters offered since CRIU began to open one
        self._announced = -1  # the master that CRIU has announced in its log
        self._above = 0

    def run(self) -> None:
        """Open the terminals and hand them to CRIU. Raise Ended."""
        if not self._known:
            return
        root = self._root
        regs = _until_forks(root)
        before = Registers.from_buffer_copy(regs)
        regs.orig_rax = NO_CALL  # the fork is made later
        root.set(regs)
        root.next()
        try:
            self._open()
        finally:
            root.set(make_again(before))
        for _ in range(MOST_CALLS):
            self._step()
            if not self._left:
                self._close(self._masters.values())
                return
        raise Ended("process 1 does not open its terminals")

    def _open(self) -> None:
        """Open all terminals. The kernel gives the lowest free index, so those in between are opened as well, and
        closed."""
        root = self._root
        self._above = self._free_numbers()
        try:
            for index in range(max(self._known) + 1):
                self._masters[index] = master = self._opened_high(b"/dev/pts/ptmx")
                at = root.put(bytes(8))
                root.must(_IOCTL, master, _TIOCGPTN, at)
                if root.number(at) != index:
                    raise Ended(f"/dev/pts/{index} is taken")
                if index in self._known:
                    root.must(_IOCTL, master, _TIOCSPTLCK, root.put(bytes(8)))
                    self._slaves[index] = self._opened_high(b"/dev/pts/%d" % index)
                    if self._known[index].leader == terminal_images.INIT:
                        root.must(_IOCTL, self._slaves[index], _TIOCSCTTY, 0)
        except Ended:
            self._close((*self._masters.values(), *self._slaves.values()))
            raise
        self._close(self._masters.pop(index) for index in [*self._masters] if index not in self._known)
        held = (*self._slaves.values(), *self._masters.values())
        root.others.inherited = range(min(held), max(held) + 1)

    def _free_numbers(self) -> int:
        """Return the lowest number for our descriptors: above all that the root has or will have open. CRIU keeps its
        own above those of the restored process, after 16 free numbers: we use these if CRIU's reach to the limit."""
        root, needed = self._root, max(self._known) + 1 + len(self._known)
        above = max(int(fd) for fd in os.listdir(f"/proc/{root.pid}/fd")) + 1
        limit = resource.prlimit(root.pid, resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY or above + needed <= limit:
            return above
        if needed > _SPARE:
            raise Ended(f"{limit} descriptors are too few")
        return self._first

    def _opened_high(self, path: bytes) -> int:
        """Open `path` in the root and return its descriptor, whose number is used by no other file."""
        root = self._root
        fd = root.must(_OPENAT, _AT_FDCWD, root.put(path + b"\0"), _FLAGS, 0)
        copy = root.must(_FCNTL, fd, _F_DUPFD_CLOEXEC, self._above)
        root.must(_CLOSE, fd)
        return copy

    def _step(self) -> None:
        """Handle the next entry or exit of a system call of the root."""
        root = self._root
        regs = root.next()
        if root.inside and regs.orig_rax == _OPENAT and root.text(regs.rsi).endswith(b"ptmx"):
            self._offer(regs)
        elif not root.inside and regs.orig_rax == _IOCTL and regs.rsi == _TIOCSPTLCK and self._offered:
            index = self._offered[-1]  # this call is the first that CRIU makes with the master it needs
            self._taken.add(index)
            self._offered = []
            if not self._known[index].is_open:
                self._finish(index)
        elif root.inside and regs.orig_rax == _WRITE and (match := _ANNOUNCED.search(root.text(regs.rsi))):
            self._announced = int(match[1])
        elif not root.inside and regs.orig_rax == _OPENAT and regs.rax < 2**63:
            self._on_opened(root.text(regs.rsi))

    def _offer(self, regs: Registers) -> None:
        """Hand CRIU an open master instead of a new one: the one it announced, if that is known. Otherwise the lowest
        first, as the kernel does: CRIU tries until it has the one it needs, and closes the others; 32 at most."""
        left = [index for index in sorted(self._masters) if index not in self._taken and index not in self._offered]
        if not left or (self._announced >= 0 and self._announced not in self._known):
            return  # the kernel gives it a new one
        left.sort(key=lambda index: index != self._announced)
        root, before = self._root, Registers.from_buffer_copy(regs)
        regs.orig_rax = NO_CALL
        root.set(regs)
        regs = root.next()
        self._offered.append(left[0])
        try:
            copy = root.must(_FCNTL, self._masters[left[0]], _F_DUPFD_CLOEXEC, 0)
            root.must(_FCNTL, copy, _F_SETFL, before.rdx)
        except Ended:
            root.set(make_again(before))
            raise
        regs.rax = copy
        root.set(regs)

    def _on_opened(self, path: bytes) -> None:
        """Finish a terminal whose slave CRIU has opened itself."""
        index = next((tty for tty in self._left if tty in self._taken and path.endswith(b"pts/%d" % tty)), None)
        if index is not None:
            self._finish(index)

    def _finish(self, index: int) -> None:
        """Set the foreground group of a terminal and close our descriptor of its slave."""
        terminal, slave = self._known[index], self._slaves.pop(index)
        self._left.remove(index)
        try:  # all tasks exist by now, and are in their groups
            if terminal.leader == terminal_images.INIT:
                group = self._root.put(terminal.foreground.to_bytes(4, "little"))
                self._root.must(_IOCTL, slave, _TIOCSPGRP, group)
            elif terminal.is_own or not terminal.is_open:
                self._root.others.set_foreground(terminal)
        except Ended as error:
            _log.warning("the foreground group of /dev/pts/%d is lost: %s", index, error)
        self._close([slave])

    def _close(self, fds: Iterable[int]) -> None:
        for fd in fds:
            self._root.call(_CLOSE, fd)


def _until_forks(task: Task) -> Registers:
    """Run the task to the entry of the fork of its first child in the session's own mounts. Helpers that CRIU runs
    earlier have the host's terminals. Raise Ended."""
    host = os.stat("/dev/pts").st_dev
    for _ in range(MOST_CALLS):
        regs = task.next()
        if task.inside and regs.orig_rax in _FORKS:
            try:
                if os.stat(f"/proc/{task.pid}/root/dev/pts").st_dev != host:
                    return regs
            except FileNotFoundError:
                continue
    raise Ended("process 1 forks no child")
