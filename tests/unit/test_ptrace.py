"""Check the ptrace wrapper on a real child process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from cmdop_migrate.criu import ptrace
from cmdop_migrate.util import proc

pytestmark = pytest.mark.skipif(not ptrace.is_possible(), reason="the registers of this machine are not known")
TRAP, USR1 = 1 << (signal.SIGTRAP - 1), 1 << (signal.SIGUSR1 - 1)
GETPID, GETPPID = 39, 110


@pytest.fixture
def child() -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        while True:
            time.sleep(0.001)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_mask_of_a_stopped_thread_is_set_and_read(child: int) -> None:
    ptrace.seize(child, ptrace.O_TRACESYSGOOD)
    ptrace.interrupt(child)
    assert os.WIFSTOPPED(ptrace.wait(child, time.monotonic() + 10))
    for mask in (TRAP | USR1, 0x8, 0x7FF8_0000_0000_0000, 0):
        ptrace.set_mask(child, mask)
        assert ptrace.mask(child) == mask
        assert int(proc.status(child)["SigBlk"], 16) == mask
    ptrace.detach(child)


def test_system_calls_are_made_in_a_task(child: int) -> None:
    task = ptrace.Task(child, within=10)
    task.seize()
    regs = task.next()
    before = ptrace.Registers.from_buffer_copy(regs)
    regs.orig_rax = ptrace.NO_CALL
    task.set(regs)
    task.next()
    assert (task.call(GETPID), task.must(GETPPID)) == (child, os.getpid())
    address = task.put(b"some text\0")
    assert task.text(address) == b"some text"
    with pytest.raises(ptrace.Ended):
        task.must(3, 99_999)  # close of a descriptor that is not open
    task.set(ptrace.make_again(before))
    task.let_go()
    assert proc.inner_pid(child) == child


def test_wait_for_a_task_that_does_not_stop_is_stuck(child: int) -> None:
    ptrace.seize(child)
    with pytest.raises(ptrace.Stuck):
        ptrace.wait(child, time.monotonic() + 0.01)
