"""Let process 1 of a restored session survive the end of the CRIU worker that is its parent, and no later parent.

The task that becomes process 1 is traced by us from before it makes its mounts until it has opened its terminals
(`controlling_tty`). CRIU must not trace it as well, as it would with `rst_sibling`. Therefore the root is the worker's
child, and becomes a child of the holder, a subreaper, when the worker ends. Until then its parent-death signal is off
(`let_parent_end`, `die_with_parent`).
"""

from __future__ import annotations

import signal
import time

import psutil

from cmdop_migrate.criu.ptrace import Ended, Registers, Stuck, Task, make_again
from cmdop_migrate.errors import TimedOut

_PRCTL, _CLOSE_RANGE = 157, 436
_PR_SET_PDEATHSIG = 1
NEXT_CALL_WITHIN = 20.0  # seconds until a running task has reached its next system call, on any machine


def let_parent_end(pid: int, lent: range = range(0)) -> int:
    """Let the restored process 1 outlive its present parent; return that parent's pid, 0 if process 1 has ended.

    `lent` are descriptors that are not the session's own: process 1 closes them first. If this command is killed in
    between, process 1 ends with its parent. Raise TimedOut if process 1 does not run."""
    try:
        parent = psutil.Process(pid).ppid()
        _set_parent_death(pid, 0, lent)
    except (psutil.NoSuchProcess, Ended):
        return 0
    return parent


def die_with_parent(pid: int, before: int, within: float = 5.0) -> None:
    """Wait until the restored process 1 has moved from its parent `before` to the holder, and make it end with the
    holder. Raise TimedOut if process 1 does not run."""
    until = time.monotonic() + within
    try:
        while psutil.Process(pid).ppid() == before and time.monotonic() < until:
            time.sleep(0.001)
        _set_parent_death(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, Ended):
        return  # it has ended, and its holder will report that


def _set_parent_death(pid: int, number: int, lent: range = range(0)) -> None:
    task = Task(pid, within=NEXT_CALL_WITHIN)
    try:
        task.seize()
        regs = task.next()  # the entry of a call of its own: ours are made first
        before = Registers.from_buffer_copy(regs)
        if lent:
            regs.orig_rax, regs.rdi, regs.rsi, regs.rdx = _CLOSE_RANGE, lent.start, lent.stop - 1, 0
        else:
            regs.orig_rax, regs.rdi, regs.rsi, regs.rdx, regs.r10 = _PRCTL, _PR_SET_PDEATHSIG, number, 0, 0
        task.set(regs)
        task.next()
        if lent:
            task.call(_PRCTL, _PR_SET_PDEATHSIG, number, 0, 0)
        task.set(make_again(before))
        task.let_go()
    except Stuck:
        hint = "The session is parked: restore it again."
        raise TimedOut(f"process {pid} of the restored session does not run", hint) from None
