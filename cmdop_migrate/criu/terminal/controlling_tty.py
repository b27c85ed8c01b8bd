"""Give every process of a restored session its controlling terminal, and each terminal its foreground group.

A process has a controlling terminal only by inheriting it when it is forked.
CRIU gives one to session leaders, but when all their children exist already:
these would have no job control and no /dev/tty for the rest of their lives. And
with an even number of descriptions of the session's own terminal (less, vim and
node open it once more by its name) CRIU gives it to no process at all. So:

- process 1 is stopped before its first fork and opens all terminals there, with
  their slaves: a session loses its terminal when it is closed by all;
- every leader of a session is stopped after its setsid(2), before it forks, and
  takes its terminal;
- when CRIU then has process 1 open a master, it is handed the one it has;
- at last the leader (process 1 as a rule) sets the foreground group of the
  session's own terminal; CRIU sets those of the others.

CRIU cannot be asked to do it, so a thread traces its tasks. Only process 1 and
the leaders stop at system calls, the other tasks at forks only and until the last
leader has its terminal. If the thread ends early, the kernel lets the tasks run
on: the session then comes back with what CRIU restores.
"""

from __future__ import annotations

import threading
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.criu.terminal import terminal_images, traced_task
from cmdop_migrate.criu.terminal.opening import Opening
from cmdop_migrate.criu.terminal.terminal_images import Terminals
from cmdop_migrate.criu.terminal.traced_task import Ended
from cmdop_migrate.criu.terminal.tracing import Root

_log = log.get("criu")


class Restoration:
    """What is to be done at each step of CRIU's for the terminals of the session in `images`."""

    def __init__(self, images: Path) -> None:
        self.is_possible = traced_task.is_possible()
        self._known = terminal_images.prepare(images, lend=self.is_possible)
        self._worker = 0

    def on_notify(self, script: str, pid: int) -> None:
        """Call it for every notification of CRIU's; `pid` is that of the restored process 1."""
        if script == "setup-namespaces" and self.is_possible:
            _Tracer.begin(pid, self._known)
        if script == "post-resume" and self.is_possible:
            self._worker = traced_task.let_parent_end(pid, self._known.lent)

    def finish(self, pid: int) -> None:
        """Call it when CRIU has answered."""
        if self._worker:
            traced_task.die_with_parent(pid, self._worker)


class _Tracer(threading.Thread):
    """Traces in a thread of its own: only the thread that began to trace may go on."""

    def __init__(self, pid: int, known: Terminals) -> None:
        super().__init__(name="ctty", daemon=True)
        self._pid, self._known = pid, known
        self._seized = threading.Event()

    @classmethod
    def begin(cls, pid: int, known: Terminals) -> None:
        """Call it when CRIU says `setup-namespaces`; the root task runs on when CRIU has the answer."""
        tracer = cls(pid, known)
        tracer.start()
        tracer._seized.wait(10)

    def run(self) -> None:
        root = Root(self._pid, {one.leader: one for one in self._known.terminals if one.leader != terminal_images.INIT})
        try:
            root.seize(follow=True)
        except (Ended, OSError) as error:
            _log.warning("processes come back without their controlling terminals: %s", error)
            return
        finally:
            self._seized.set()
        try:
            Opening(root, self._known).run()
        except (Ended, OSError) as error:
            _log.warning("processes come back without their controlling terminals: %s", error)
        try:
            root.others.release()  # before root: CRIU traces all of them as soon as root is done
            root.let_go()
        except Ended:
            return  # with the restore: CRIU says why
