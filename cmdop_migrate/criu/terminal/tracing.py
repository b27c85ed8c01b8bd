"""Trace the tasks of a restore until every leader of a session has its controlling terminal."""

from __future__ import annotations

import os

from cmdop_migrate import log
from cmdop_migrate.criu.terminal import traced_task
from cmdop_migrate.criu.terminal.terminal_images import Terminal
from cmdop_migrate.criu.terminal.traced_task import Ended, Regs, Task

_log = log.get("criu")
_WALL, _WNOTHREAD = 0x40000000, 0x20000000
_CLOSE, _IOCTL, _SETSID, _OPENAT, _CLOSE_RANGE = 3, 16, 112, 257, 436
_TIOCSCTTY, _TIOCSPGRP = 0x540E, 0x5410
_AT_FDCWD = -100
_FLAGS = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
NO_CALL = 2**64 - 1


class Root(Task):
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
        self._took: dict[int, int] = {}  # leader that has its terminal: its pid on this host

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
            elif traced_task.is_at_call(status):
                self._at_call(task)
            else:
                if traced_task.has_forked(status):
                    self.on_birth(task.child())
                task.resume(traced_task.passing_signal(status), _number_inside(pid) in self.leaders)
        except (Ended, OSError) as error:
            _log.warning("a task of the restore ended: %s", error)
            self._tasks.pop(pid, None)

    def _at_call(self, task: Task) -> None:
        task.inside = not task.inside
        regs = task.registers()
        if task.inside or regs.orig_rax != _SETSID or regs.rax >= 2**63:
            task.resume(at_calls=True)
            return
        terminal = self.leaders.pop(int(regs.rax), None)
        if terminal is None:
            task.resume(at_calls=True)
            return
        try:
            slave = task.must(_OPENAT, _AT_FDCWD, task.put(b"/dev/pts/%d\0" % terminal.index), _FLAGS, 0)
            task.must(_IOCTL, slave, _TIOCSCTTY, 0)
            task.must(_CLOSE, slave)
            self._took[terminal.leader] = task.pid
        except Ended as error:
            _log.warning("session %d comes back without /dev/pts/%d: %s", terminal.leader, terminal.index, error)
        task.resume()
        if not self.leaders:
            self.release()

    def set_foreground(self, terminal: Terminal) -> None:
        """Make the leader of its session set the terminal's foreground group. Raises Ended."""
        task = Task(self._took.get(terminal.leader, 0))
        task.seize()
        regs = task.next()
        before = Regs.from_buffer_copy(regs)
        regs.orig_rax = NO_CALL
        task.set(regs)
        task.next()
        try:
            slave = task.must(_OPENAT, _AT_FDCWD, task.put(b"/dev/pts/%d\0" % terminal.index), _FLAGS, 0)
            error = task.call(_IOCTL, slave, _TIOCSPGRP, task.put(terminal.foreground.to_bytes(4, "little")))
            task.must(_CLOSE, slave)
        finally:
            task.set(again(before))
            task.let_go()
        if error:
            raise Ended(os.strerror(-error))

    def release(self) -> None:
        """Trace none of them any more."""
        self.leaders = {}
        for pid, task in list(self._tasks.items()):
            try:
                task.interrupt()
                status = task.wait()
                if traced_task.has_forked(status):
                    self.on_birth(task.child())
                task.let_go(traced_task.passing_signal(status))
            except (Ended, OSError):
                pass  # it has ended, or has been let go with its parent
            self._tasks.pop(pid, None)


def again(at_entry: Regs) -> Regs:
    """-> registers with which a task makes, once more, the system call at whose entry it had these."""
    regs = Regs.from_buffer_copy(at_entry)
    regs.rax, regs.orig_rax, regs.rip = regs.orig_rax, NO_CALL, regs.rip - 2
    return regs


def _number_inside(pid: int) -> int:
    """-> the pid that the process has in its own pid namespace."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
        return next((int(line.split()[-1]) for line in status if line.startswith("NSpid:")), 0)
