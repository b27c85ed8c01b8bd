"""Give every process of a restored session its controlling terminal, and each terminal its foreground group.

A process has a controlling terminal only by inheriting it when it is forked.
CRIU gives one to session leaders, but when all their children exist already:
these would have no job control and no /dev/tty for the rest of their lives. And
with an even number of descriptions of the session's own terminal (less, vim and
node open it once more by its name) CRIU gives it to no process at all. So:

- process 1 is stopped before its first fork and opens all terminals there, with
  their slaves: a session loses its terminal with the last descriptor of a slave;
- every leader of a session is stopped after its setsid(2), before it forks, and
  takes its terminal;
- when CRIU then has process 1 open a master, it is handed the one it has;
- at last process 1 sets the foreground group of its own terminal; CRIU sets those
  of the others.

CRIU cannot be asked to do it, so a thread traces its tasks. Only process 1 and
the leaders stop at system calls, the other tasks at forks only and until the last
leader has its terminal. If the thread ends early, the kernel lets the tasks run
on: the session then comes back with what CRIU restores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.criu import ctty, terminals
from cmdop_migrate.criu.ctty import Ended, Regs, Task
from cmdop_migrate.criu.terminals import Terminal

_log = log.get("criu")
_WALL, _WNOTHREAD = 0x40000000, 0x20000000
_CLOSE, _IOCTL, _FCNTL, _SETSID, _OPENAT, _CLOSE_RANGE = 3, 16, 72, 112, 257, 436
_FORKS = (56, 57, 58, 435)
_TIOCSCTTY, _TIOCSPGRP, _TIOCSPTLCK, _TIOCGPTN = 0x540E, 0x5410, 0x40045431, 0x80045430
_F_SETFL, _F_DUPFD_CLOEXEC = 4, 1030
_HIGH = 400  # above what a session's first process has open, below where CRIU keeps its own
_AT_FDCWD = -100
_FLAGS = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
_NO_CALL = 2**64 - 1
STEPS = 200_000  # system calls; some hundreds are usual


class Restoration:
    """What is to be done at each step of CRIU's for the terminals of the session in `images`."""

    def __init__(self, images: Path) -> None:
        self.is_possible = ctty.is_possible()
        self._known = terminals.prepare(images, lend=self.is_possible)
        self._worker = 0

    def on_notify(self, script: str, pid: int) -> None:
        """Call it for every notification of CRIU's; `pid` is that of the restored process 1."""
        if script == "setup-namespaces" and self.is_possible:
            _Tracer.begin(pid, self._known.terminals)
        if script == "post-resume" and self.is_possible:
            self._worker = ctty.let_parent_end(pid, self._known.lent)

    def finish(self, pid: int) -> None:
        """Call it when CRIU has answered."""
        if self._worker:
            ctty.die_with_parent(pid, self._worker)


class _Tracer(threading.Thread):
    """Traces in a thread of its own: only the thread that began to trace may go on."""

    def __init__(self, pid: int, known: tuple[Terminal, ...]) -> None:
        super().__init__(name="ctty", daemon=True)
        self._pid, self._known = pid, known
        self._seized = threading.Event()

    @classmethod
    def begin(cls, pid: int, known: tuple[Terminal, ...]) -> None:
        """Call it when CRIU says `setup-namespaces`; the root task runs on when CRIU has the answer."""
        tracer = cls(pid, known)
        tracer.start()
        tracer._seized.wait(10)

    def run(self) -> None:
        root = _Root(self._pid, {one.leader: one for one in self._known if one.leader != terminals.INIT})
        try:
            root.seize(follow=True)
        except (Ended, OSError) as error:
            _log.warning("processes come back without their controlling terminals: %s", error)
            return
        finally:
            self._seized.set()
        try:
            _Opening(root, self._known).run()
        except (Ended, OSError) as error:
            _log.warning("processes come back without their controlling terminals: %s", error)
        try:
            root.others.release()  # before root: CRIU traces all of them as soon as root is done
            root.let_go()
        except Ended:
            return  # with the restore: CRIU says why


class _Root(Task):
    """The task that becomes process 1. While it is waited for, what the other tasks do is seen to."""

    def __init__(self, pid: int, leaders: dict[int, Terminal]) -> None:
        super().__init__(pid)
        self.others = _Others(leaders)

    def wait(self) -> int:
        while True:
            pid, status = os.waitpid(-1, _WALL | _WNOTHREAD)
            if pid != self.pid:
                self.others.on_event(pid, status)
            elif os.WIFSTOPPED(status):
                return status
            else:
                raise Ended("the task ended")

    def on_fork(self, child: int) -> None:
        self.others.on_birth(child)


class _Others:
    """All traced tasks but the root. `leaders`: who still waits for a terminal, by the tree's numbers."""

    def __init__(self, leaders: dict[int, Terminal]) -> None:
        self.leaders = leaders
        self.inherited = range(0)  # descriptors of the root's that no child of it shall have
        self._tasks: dict[int, Task] = {}
        self._early: set[int] = set()  # stopped before their parents have told of them

    def on_birth(self, pid: int) -> None:
        task = Task(pid)
        try:
            if pid in self._early:
                self._early.remove(pid)
            else:
                task.wait()
            if self.inherited:
                task.must(_CLOSE_RANGE, self.inherited.start, self.inherited.stop - 1, 0)
            if self.leaders and self.inherited:  # else it is a helper that CRIU forked before
                self._tasks[pid] = task
                task.resume(at_calls=_number_inside(pid) in self.leaders)
            else:
                task.let_go()
        except (Ended, OSError) as error:
            _log.warning("a task of the restore ended: %s", error)
            self._tasks.pop(pid, None)

    def on_event(self, pid: int, status: int) -> None:
        task = self._tasks.get(pid)
        if task is None:
            if os.WIFSTOPPED(status):
                self._early.add(pid)
            return
        try:
            if not os.WIFSTOPPED(status):
                del self._tasks[pid]
            elif ctty.is_at_call(status):
                self._at_call(task)
            else:
                if ctty.has_forked(status):
                    self.on_birth(task.child())
                task.resume(ctty.passing_signal(status), _number_inside(pid) in self.leaders)
        except (Ended, OSError) as error:
            _log.warning("a task of the restore ended: %s", error)
            self._tasks.pop(pid, None)

    def _at_call(self, task: Task) -> None:
        task.inside = not task.inside
        regs = task.registers()
        if task.inside or regs.orig_rax != _SETSID or regs.rax >= 2**63:
            task.resume(at_calls=True)
            return
        terminal = self.leaders.pop(int(regs.rax))
        try:
            slave = task.must(_OPENAT, _AT_FDCWD, task.put(b"/dev/pts/%d\0" % terminal.index), _FLAGS, 0)
            task.must(_IOCTL, slave, _TIOCSCTTY, 0)
            task.must(_CLOSE, slave)
        except Ended as error:
            _log.warning("session %d comes back without /dev/pts/%d: %s", terminal.leader, terminal.index, error)
        task.resume()
        if not self.leaders:
            self.release()

    def release(self) -> None:
        """Trace none of them any more."""
        self.leaders = {}
        for pid, task in list(self._tasks.items()):
            try:
                task.interrupt()
                status = task.wait()
                if ctty.has_forked(status):
                    self.on_birth(task.child())
                task.let_go(ctty.passing_signal(status))
            except (Ended, OSError):
                pass  # it has ended, or has been let go with its parent
            self._tasks.pop(pid, None)


class _Opening:
    """From the root's first fork until CRIU has opened every terminal in it."""

    def __init__(self, root: _Root, known: tuple[Terminal, ...]) -> None:
        self._root, self._known = root, {one.index: one for one in known}
        self._masters: dict[int, int] = {}  # index: descriptor in the root
        self._slaves: dict[int, int] = {}  # the same, of those that CRIU has not opened yet
        self._taken: set[int] = set()  # masters that CRIU has
        self._offered: list[int] = []  # since CRIU began to look for one master

    def run(self) -> None:
        if not self._known:
            return
        root = self._root
        regs = _until_forks(root)
        before = Regs.from_buffer_copy(regs)
        regs.orig_rax = _NO_CALL  # the fork waits
        root.set(regs)
        root.next()
        try:
            self._open()
        finally:
            before.rax, before.orig_rax, before.rip = before.orig_rax, _NO_CALL, before.rip - 2
            root.set(before)
        for _ in range(STEPS):
            self._step()
            if not self._slaves:
                self._close(self._masters.values())
                return
        raise Ended("it does not open its terminals")

    def _open(self) -> None:
        """Open them all. The kernel gives the lowest free number, so those between are opened as well, and closed."""
        root = self._root
        try:
            for index in range(max(self._known) + 1):
                self._masters[index] = master = _opened_high(root, b"/dev/pts/ptmx")
                at = root.put(bytes(8))
                root.must(_IOCTL, master, _TIOCGPTN, at)
                if root.number(at) != index:
                    raise Ended(f"/dev/pts/{index} is taken")
                if index in self._known:
                    root.must(_IOCTL, master, _TIOCSPTLCK, root.put(bytes(8)))
                    self._slaves[index] = _opened_high(root, b"/dev/pts/%d" % index)
                    if self._known[index].leader == terminals.INIT:
                        root.must(_IOCTL, self._slaves[index], _TIOCSCTTY, 0)
        except Ended:
            self._close((*self._masters.values(), *self._slaves.values()))
            raise
        self._close(self._masters.pop(index) for index in [*self._masters] if index not in self._known)
        held = (*self._slaves.values(), *self._masters.values())
        root.others.inherited = range(min(held), max(held) + 1)

    def _step(self) -> None:
        """See to the next system call of the root's."""
        root = self._root
        regs = root.next()
        if root.inside and regs.orig_rax == _OPENAT and root.text(regs.rsi).endswith(b"ptmx"):
            self._offer(regs)
        elif root.inside and regs.orig_rax == _IOCTL and regs.rsi == _TIOCSPTLCK and self._offered:
            self._taken.add(self._offered[-1])  # the first that CRIU does with the one it looked for
            self._offered = []
        elif not root.inside and regs.orig_rax == _OPENAT and regs.rax < 2**63:
            self._on_opened(root.text(regs.rsi))

    def _offer(self, regs: Regs) -> None:
        """Hand CRIU a master instead of a new one. Like the kernel, the lowest first: CRIU tries until it has the one
        it wants, and closes the others."""
        left = [index for index in sorted(self._masters) if index not in self._taken and index not in self._offered]
        if not left:
            return
        root, flags = self._root, regs.rdx
        regs.orig_rax = _NO_CALL
        root.set(regs)
        regs = root.next()
        self._offered.append(left[0])
        copy = root.must(_FCNTL, self._masters[left[0]], _F_DUPFD_CLOEXEC, 0)
        root.must(_FCNTL, copy, _F_SETFL, flags)
        regs.rax = copy
        root.set(regs)

    def _on_opened(self, path: bytes) -> None:
        """CRIU has opened a slave of its own: ours is needed no more."""
        index = next((one for one in self._slaves if one in self._taken and path.endswith(b"pts/%d" % one)), None)
        if index is None:
            return
        terminal, slave = self._known[index], self._slaves.pop(index)
        if terminal.leader == terminals.INIT:  # all tasks exist by now, and are in their groups
            group = self._root.put(terminal.foreground.to_bytes(4, "little"))
            error = self._root.call(_IOCTL, slave, _TIOCSPGRP, group)
            if error:
                _log.warning("the foreground group of /dev/pts/%d is lost: %s", index, os.strerror(-error))
        self._close([slave])

    def _close(self, fds: Iterable[int]) -> None:
        for fd in fds:
            self._root.call(_CLOSE, fd)


def _until_forks(task: Task) -> Regs:
    """To the entry of the fork of its first child in the session's own mounts; the helpers CRIU runs before have the
    host's terminals."""
    host = os.stat("/dev/pts").st_dev
    for _ in range(STEPS):
        regs = task.next()
        if task.inside and regs.orig_rax in _FORKS:
            try:
                if os.stat(f"/proc/{task.pid}/root/dev/pts").st_dev != host:
                    return regs
            except FileNotFoundError:
                continue
    raise Ended("it forks no child")


def _opened_high(task: Task, path: bytes) -> int:
    """-> a descriptor of `path` in the task, where it is in no one's way."""
    fd = task.must(_OPENAT, _AT_FDCWD, task.put(path + b"\0"), _FLAGS, 0)
    copy = task.must(_FCNTL, fd, _F_DUPFD_CLOEXEC, _HIGH)
    task.must(_CLOSE, fd)
    return copy


def _number_inside(pid: int) -> int:
    """-> the pid that the process has in its own pid namespace."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
        return next((int(line.split()[-1]) for line in status if line.startswith("NSpid:")), 0)
