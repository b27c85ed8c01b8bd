"""Trace the tasks of a restore until every leader of a session has its controlling terminal."""

from __future__ import annotations

import os

from cmdop_migrate import log
from cmdop_migrate.criu import ptrace
from cmdop_migrate.criu.ptrace import NO_CALL, Ended, Registers, Task, make_again
from cmdop_migrate.criu.terminal.terminal_images import Terminal
from cmdop_migrate.util import proc

_log = log.get("criu")
_WNOTHREAD = 0x20000000  # for waitpid: tasks of this thread only
_CLOSE, _IOCTL, _SETSID, _OPENAT, _CLOSE_RANGE = 3, 16, 112, 257, 436
_TIOCSCTTY, _TIOCSPGRP = 0x540E, 0x5410
_AT_FDCWD = -100
_FLAGS = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC


class Root(Task):
    """Control the task that becomes process 1. `wait` also handles the events of the other traced tasks."""

    def __init__(self, pid: int, leaders: dict[int, Terminal]) -> None:
        super().__init__(pid)
        self.others = _Others(leaders)

    def wait(self) -> int:
        """Wait until the root has stopped, and return its status. Raise Ended."""
        while True:
            pid, status = os.waitpid(-1, ptrace.WALL | _WNOTHREAD)
            if pid != self.pid:
                self.others.on_event(pid, status)
            elif os.WIFSTOPPED(status):
                return status
            else:
                raise Ended("the task ended")

    def on_fork(self, child: int) -> None:
        """Handle a child of the root."""
        self.others.on_new_task(child)


class _Others:
    """Control all traced tasks except the root. `leaders`: session leaders that still need their terminal, by the
    numbers of the tree."""

    def __init__(self, leaders: dict[int, Terminal]) -> None:
        self.leaders = leaders
        self.inherited = range(0)  # descriptors of the root that its children must not have
        self._tasks: dict[int, Task] = {}
        self._early: set[int] = set()  # tasks that stopped before their parents reported the fork
        self._took: dict[int, int] = {}  # leader that has taken its terminal: its pid on this host

    def on_new_task(self, pid: int) -> None:
        """Handle a task that a traced one has forked: close the root's descriptors, and trace it or let it go."""
        task = Task(pid)
        try:
            if pid in self._early:
                self._early.remove(pid)
            else:
                task.wait()
            if self.inherited:
                task.must(_CLOSE_RANGE, self.inherited.start, self.inherited.stop - 1, 0)
            if self.leaders and self.inherited:  # else it is a helper that CRIU forked earlier
                self._tasks[pid] = task
                task.resume(at_calls=proc.inner_pid(pid) in self.leaders)
            else:
                task.let_go()
        except (Ended, OSError) as error:
            _log.warning("a task of the restore has ended: %s", error)
            self._tasks.pop(pid, None)

    def on_event(self, pid: int, status: int) -> None:
        """Handle the stop or the end of a task, which may not be known yet."""
        task = self._tasks.get(pid)
        if task is None:
            if os.WIFSTOPPED(status):
                self._early.add(pid)
            return
        try:
            if not os.WIFSTOPPED(status):
                del self._tasks[pid]
            elif ptrace.is_at_call(status):
                self._at_call(task)
            else:
                if ptrace.has_forked(status):
                    self.on_new_task(task.child())
                task.resume(ptrace.passing_signal(status), proc.inner_pid(pid) in self.leaders)
        except (Ended, OSError) as error:
            _log.warning("a task of the restore has ended: %s", error)
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
            _log.warning(
                "session %d is restored without its terminal /dev/pts/%d: %s", terminal.leader, terminal.index, error
            )
        task.resume()
        if not self.leaders:
            self.release()

    def set_foreground(self, terminal: Terminal) -> None:
        """Make the session leader of the terminal set its foreground group. Raise Ended."""
        task = Task(self._took.get(terminal.leader, 0))
        task.seize()
        regs = task.next()
        before = Registers.from_buffer_copy(regs)
        regs.orig_rax = NO_CALL
        task.set(regs)
        task.next()
        try:
            slave = task.must(_OPENAT, _AT_FDCWD, task.put(b"/dev/pts/%d\0" % terminal.index), _FLAGS, 0)
            error = task.call(_IOCTL, slave, _TIOCSPGRP, task.put(terminal.foreground.to_bytes(4, "little")))
            task.must(_CLOSE, slave)
        finally:
            task.set(make_again(before))
            task.let_go()
        if error:
            raise Ended(os.strerror(-error))

    def release(self) -> None:
        """Stop tracing all these tasks."""
        self.leaders = {}
        for pid, task in list(self._tasks.items()):
            try:
                task.interrupt()
                status = task.wait()
                if ptrace.has_forked(status):
                    self.on_new_task(task.child())
                task.let_go(ptrace.passing_signal(status))
            except (Ended, OSError):
                pass  # it has ended, or was released with its parent
            self._tasks.pop(pid, None)
