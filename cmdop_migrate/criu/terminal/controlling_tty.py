"""Give every process of a restored session its controlling terminal, and each terminal its foreground group.

A process that is no session leader gets its controlling terminal only by inheriting it at fork. CRIU gives terminals to
session leaders, but after all their children exist: these would have no job control and no /dev/tty for the rest of
their lives. And with an even number of descriptions of the session's own terminal (less, vim and node open it once more
by its name) CRIU gives it to no process at all. So:

- process 1 is stopped before its first fork and opens all terminals there, with their slaves: a session loses its
  terminal when every process has closed it;
- every leader of a session is stopped after its setsid(2), before it forks, and takes its terminal;
- when CRIU then has process 1 open a master, it receives the one that is open already;
- finally the leader (usually process 1) sets the foreground group of the session's own terminal; CRIU sets those of the
  others.

CRIU has no option for this, so a thread traces its tasks. Only process 1 and the leaders stop at system calls, the
other tasks at forks only and until the last leader has its terminal. If the thread ends early, the kernel lets the
tasks run: the session then has the terminals that CRIU restores.
"""

from __future__ import annotations

import threading
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.criu import ptrace
from cmdop_migrate.criu.ptrace import Ended
from cmdop_migrate.criu.terminal import parent_death, terminal_images
from cmdop_migrate.criu.terminal.opening import Opening
from cmdop_migrate.criu.terminal.terminal_images import Terminals
from cmdop_migrate.criu.terminal.tracing import Root

_log = log.get("criu")


class Restoration:
    """Restore the terminals of the session in `images`, at the notifications of one CRIU."""

    def __init__(self, images: Path) -> None:
        self.is_possible = ptrace.is_possible()
        self._known = terminal_images.prepare(images, lend=self.is_possible)
        self._worker = 0

    def on_notify(self, script: str, pid: int) -> None:
        """Handle a notification of CRIU; `pid` is that of the restored process 1. Raise TimedOut."""
        if script == "setup-namespaces" and self.is_possible:
            _Tracer.begin(pid, self._known)
        if script == "post-resume" and self.is_possible:
            self._worker = parent_death.let_parent_end(pid, self._known.lent)

    def finish(self, pid: int) -> None:
        """Handle the end of CRIU: make process 1 end with its new parent, the holder. Raise TimedOut."""
        if self._worker:
            parent_death.die_with_parent(pid, self._worker)


class _Tracer(threading.Thread):
    """Trace in a separate thread: only the thread that began to trace a task may continue to."""

    def __init__(self, pid: int, known: Terminals) -> None:
        super().__init__(name="ctty", daemon=True)
        self._pid, self._known = pid, known
        self._seized = threading.Event()

    @classmethod
    def begin(cls, pid: int, known: Terminals) -> None:
        """Start tracing, at the notification `setup-namespaces`. The root task runs when CRIU has the answer."""
        tracer = cls(pid, known)
        tracer.start()
        tracer._seized.wait(10)

    def run(self) -> None:
        """Open the terminals in the root task and give each leader its own."""
        terminals = self._known.terminals
        root = Root(self._pid, {tty.leader: tty for tty in terminals if tty.leader != terminal_images.INIT})
        try:
            root.seize(follow=True)
        except (Ended, OSError) as error:
            _log.warning("processes are restored without their controlling terminals: %s", error)
            return
        finally:
            self._seized.set()
        try:
            Opening(root, self._known).run()
        except (Ended, OSError) as error:
            _log.warning("processes are restored without their controlling terminals: %s", error)
        try:
            root.others.release()  # before root: CRIU traces all of them as soon as root is done
            root.let_go()
        except Ended:
            return  # the restore has failed, and CRIU reports why
