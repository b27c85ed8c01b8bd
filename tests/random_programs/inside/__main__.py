"""Build the processes of a spec inside a session, and answer questions about them.

    python tests/random_programs/inside SPEC.json DIR

Each process reads commands from the fifo DIR/ID.ctl, one line each, `NUMBER WORD ARGUMENTS`, and answers with the file
DIR/ID.NUMBER.json: {"pid", "value"} or {"pid", "error"}. The first answer, of number 0, comes when it is built.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import sys
import termios
import traceback
from typing import Any, NoReturn

import exotic
import files
import ipc
import memory
import sockets
import states
import terminals
from base import KINDS, Holding

MODULES = (exotic, files, ipc, memory, sockets, states, terminals)
CONTROL = 900  # the number of the control fifo: out of the way of what is tested
Spec = dict[str, Any]


class Worker:
    def __init__(self, spec: Spec, directory: str) -> None:
        self.spec, self.directory = spec, directory
        self.me: Spec = {}
        self.own: list[tuple[str, Holding]] = []
        self.inherited: list[tuple[str, Holding]] = []
        self.masters: dict[int, int] = {}  # process -> master of the terminal it leads
        self.control = -1

    def become(self, number: int) -> None:
        """Take over process `number` of the spec: open its fifo, build, fork its children, build the rest."""
        if self.control >= 0:
            os.close(self.control)
        self.me = self.spec["processes"][number]
        self.inherited = [*self.inherited, *self.own]
        for _, one in self.inherited:
            one.inherited()
        self.own = []
        fifo = f"{self.directory}/{number}.ctl"
        os.mkfifo(fifo)
        first = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
        self.control = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, CONTROL)
        os.close(first)
        self.build(early=True)
        for child in self.spec["processes"]:
            if child["parent"] == number:
                self.fork(child)
        self.build(early=False)
        self.answer(0, "built")

    def build(self, early: bool) -> None:
        for at, feature in enumerate(self.me["features"]):
            if feature["early"] == early:
                label = f"{self.me['number']}.{at}.{feature['name']}"
                one = KINDS[feature["name"]](feature["seed"], f"{self.directory}/{label}")
                try:
                    one.build()
                except Exception as error:
                    raise RuntimeError(f"cannot build {label}: {error!r}") from error
                self.own.append((label, one))

    def fork(self, child: Spec) -> None:
        ends = pty.openpty() if child["kind"] == "terminal" else None
        pid = os.fork()
        if pid == 0:
            self.masters = {}
            try:
                self.settle(child["kind"], ends)
                self.become(child["number"])
            except BaseException:
                self.fail()
            self.serve()
        if ends:
            self.masters[child["number"]] = ends[0]
            os.close(ends[1])

    def fail(self) -> NoReturn:
        """Report that this process could not be built, and stay: with the first process the session would end."""
        self.answer(0, error=traceback.format_exc())
        while True:
            signal.pause()

    def settle(self, kind: str, ends: tuple[int, int] | None) -> None:
        """Enter the process group, session or terminal that a child of this kind has."""
        if kind == "group":
            os.setpgid(0, 0)
        elif kind == "session":
            os.setsid()
        elif ends:
            os.setsid()
            os.close(ends[0])
            fcntl.ioctl(ends[1], termios.TIOCSCTTY, 0)
            for fd in range(3):
                os.dup2(ends[1], fd)
            os.close(ends[1])

    def serve(self) -> None:
        while True:
            line = b""
            while not line.endswith(b"\n"):
                line += os.read(self.control, 1)
            number, word, *args = line.decode().split()
            try:
                self.answer(int(number), getattr(self, f"do_{word}")(*args))
            except Exception as error:
                self.answer(int(number), error=f"{error!r} {''.join(traceback.format_tb(error.__traceback__)[-1:])}")

    def answer(self, number: int, value: Any = None, error: str | None = None) -> None:
        path = f"{self.directory}/{self.me['number']}.{number}.json"
        # Through a fresh descriptor of the root: a chroot must not hide the answers.
        fd = os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        found = {"pid": os.getpid(), "value": value} if error is None else {"pid": os.getpid(), "error": error}
        os.write(fd, json.dumps(found).encode())
        os.close(fd)
        os.rename(f"{path}.part", path)

    def holdings(self) -> list[tuple[str, Holding]]:
        return [*self.inherited, *self.own]

    def do_report(self) -> dict[str, Any]:
        ids = [os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0)]
        return {"ids": ids, **{label: one.report() for label, one in self.holdings()}}

    def do_use(self) -> None:
        for label, one in self.own:
            self.tried(label, one.use)

    def do_check(self) -> None:
        for label, one in self.holdings():
            self.tried(label, one.check)

    def tried(self, label: str, work: Any) -> None:
        try:
            work()
        except Exception as error:
            raise RuntimeError(f"{label}: {error!r}") from error

    def do_foreground(self, group: str) -> None:
        """Give the terminal to a process group, as a shell's `fg` does."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            os.tcsetpgrp(0, int(group))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def do_type(self, process: str, text: str) -> None:
        os.write(self.masters[int(process)], text.encode() + b"\n")

    def do_line(self) -> str:
        """Read a line from the terminal; in the background this stops the process group (SIGTTIN)."""
        return os.read(0, 4096).decode().rstrip("\n")

    def do_modes(self) -> None:
        """Set the terminal's modes as they are; in the background this stops the process group (SIGTTOU)."""
        termios.tcsetattr(0, termios.TCSANOW, termios.tcgetattr(0))

    def do_stop(self, name: str) -> None:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(0 if name == "TSTP" else os.getpid(), getattr(signal, f"SIG{name}"))


def main() -> None:
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    os.mkdir(sys.argv[2])
    worker = Worker(spec, sys.argv[2])
    try:
        worker.become(0)
    except BaseException:
        worker.fail()
    worker.serve()


if __name__ == "__main__":
    main()
