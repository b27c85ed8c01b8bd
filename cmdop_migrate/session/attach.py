"""Attach a user's terminal to a session, and restore that terminal in every case."""

from __future__ import annotations

import os
import select
import signal
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from cmdop_migrate.errors import Usage
from cmdop_migrate.holder.output_ring import Modes
from cmdop_migrate.session import screen
from cmdop_migrate.session.holder_client import Channel, HolderGone

ENDINGS = (signal.SIGTERM, signal.SIGHUP)
# What happens to a session behind a relay while no output arrives.
AWAY = {
    "moving": "moving to {to} …",
    "parked": "parked in the store; it continues when it is restored …",
    "waiting": "no host has it just now; waiting …",
    "away": "the relay does not answer; trying again …",
}
STEP = 4096  # bytes of input in one frame
MAX_UNSENT = 1 << 20  # bytes kept here for a session that does not read; above it the keyboard is not read
UNDONE = (("output", "of output"), ("input", "you typed"))


@dataclass(frozen=True)
class Outcome:
    """Say how an attach ended; `seq` is where the next one may continue."""

    kind: Literal["detached", "exited", "lost", "hangup"]
    seq: int
    lost: int
    detail: dict[str, Any]


def size_of(fd: int) -> tuple[int, int]:
    """Return rows and columns of a terminal; 24 and 80 if it has none."""
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        return 24, 80
    return size.lines or 24, size.columns or 80


def attach(channel: Channel, actor: str, read_only: bool, start: int | None, keyboard: int, display: int) -> Outcome:
    """Connect terminal and session until detach, exit, or the end of either. Raise Usage."""
    if not os.isatty(keyboard) or not os.isatty(display):
        raise Usage("attach needs a terminal", "From a script, use: cmdop-migrate send / output / wait")
    rows, cols = size_of(display)
    request: dict[str, Any] = {"actor": actor, "read_only": read_only, "from": start, "terminal": True}
    request |= {"rows": rows, "cols": cols}
    answer = channel.ask(op="attach", **request)
    if answer.get("error") == "range":
        raise Usage(f"no output has number {start} yet", f"Give a number from {answer['start']} to {answer['end']}.")
    with _Terminal(keyboard, display) as terminal:
        return _Attachment(channel, terminal, answer, start, read_only, actor).run()


def refusal(message: dict[str, Any]) -> str:
    """Return what to tell a user whose input was not applied."""
    if message.get("why") == "turn":
        return (
            f"{message['holder']} has the write turn: {message['bytes']} bytes you typed were discarded;"
            " ask for it with: cmdop-migrate turn SESSION request"
        )
    if message.get("why") == "gate":
        return f"the line was refused, and erased: {message['reason']}"
    return f"{message['bytes']} bytes you typed came too late, and were discarded"


def turn_words(message: dict[str, Any], actor: str, seized: bool) -> str:
    """Return what concerns `actor` in a change of the turn; `seized`: the session was frozen before it."""
    holder, before = message["holder"], message.get("before")
    if message["frozen"]:
        return f"frozen: {holder} seized the session"
    words = "resumed; " if seized else ""
    if message["do"] == "show":
        return f"{holder} has the write turn" if holder != actor else ""
    if holder == actor != before:
        return words + "you have the write turn"
    if before == actor != holder:
        return words + (f"{holder} has the write turn now" if holder else "your write turn is over")
    return words.removesuffix("; ")


class _Attachment:
    """Run one attach."""

    def __init__(
        self,
        channel: Channel,
        terminal: _Terminal,
        answer: dict[str, Any],
        start: int | None,
        read_only: bool,
        actor: str,
    ) -> None:
        self.actor, self.seized = actor, False
        self.channel, self.terminal, self.read_only = channel, terminal, read_only
        self.live_from: int = answer["end"]
        self.seq: int = answer["start"] if start is None else start
        self.lost = 0
        self.replay: screen.Replay | None = screen.Replay()
        self.keys = screen.Keys()
        self.untyped = (
            bytearray()
        )  # input that the session does not read yet: waiting for it would block everything else
        self.resized = False  # it does not read that this terminal has another size either
        self.noticed = False
        if start is None:
            terminal.show(screen.set_modes(answer["modes"]))

    def run(self) -> Outcome:
        with _signals(signal.SIGWINCH, signal.SIGCONT, *ENDINGS) as wake:
            try:
                self._resize()  # the size may have changed before SIGWINCH was handled
                self._maybe_live()
                while True:
                    outcome = self._serve(wake)
                    if outcome is not None:
                        return outcome
            except HolderGone:
                return self._outcome("lost")
            except (OSError, termios.error):
                return self._outcome("hangup")  # the terminal is gone: its window was closed

    def _serve(self, wake: int) -> Outcome | None:
        """Wait for something to do, and do it."""
        outcome = None
        readers = [wake, self.terminal.keyboard] if len(self.untyped) < MAX_UNSENT else [wake]
        ready = self.channel.wait(readers, for_room=bool(self.untyped or self.resized))
        if ready.room:
            self._type()
        if wake in ready.readable:
            numbers = os.read(wake, 64)
            if any(ending in numbers for ending in ENDINGS):
                return self._outcome("hangup")
            if signal.SIGCONT in numbers:
                self.terminal.make_raw()  # the process that stopped us has used the terminal meanwhile
            self._resize()
        if ready.items:
            outcome = self._from_session()
        if outcome is None and self.terminal.keyboard in ready.readable:
            outcome = self._from_person()
        return outcome

    def _from_session(self) -> Outcome | None:
        for message in self.channel.pending():
            if isinstance(message, tuple):
                self._show(*message)
            elif message.get("event") == "lost":
                self.lost += message["bytes"]
                self.seq = message["from"] + message["bytes"]
                self.terminal.show(b"\r\n[%d bytes of output were too much to keep]\r\n" % message["bytes"])
            elif message.get("event") in ("fenced", "unfenced"):
                verb = "frozen" if message["event"] == "fenced" else "resumed"
                self.terminal.show(f"\r\n[{verb}: {message['why']}]\r\n".encode())
            elif message.get("event") == "refused":
                self._say(refusal(message))
            elif message.get("event") == "turn":
                self._say(turn_words(message, self.actor, self.seized))
                self.seized = bool(message["frozen"])
            elif message.get("event") == "undone":
                self._say_undone(message)
            elif message.get("event") in AWAY:
                self._notice(AWAY[message["event"]].format(to=message.get("to") or "another host"))
            elif message.get("event") == "resumed":
                self._notice(None)
            elif message.get("event") == "exit":
                self._notice(None)
                return self._outcome("exited", message)
        return None

    def _notice(self, text: str | None) -> None:
        """Show where the session is while it is not here; None: it is here again."""
        full, (rows, cols) = screen.is_full_screen(self.terminal.modes), size_of(self.terminal.display)
        if self.noticed:
            self.terminal.show(screen.no_notice(full, rows))
            if text is None and full:
                self._repaint()
        if text is not None:
            self.terminal.show(screen.notice(text, full, rows, cols))
        self.noticed = text is not None

    def _say_undone(self, message: dict[str, Any]) -> None:
        self._notice(None)
        parts = [f"{message[key]} bytes {what}" for key, what in UNDONE if message.get(key)]
        self.terminal.show(f"\r\n[{' and '.join(parts)} were undone with the host that died]\r\n".encode())

    def _say(self, words: str) -> None:
        if words:
            plain = "".join(char for char in words if char.isprintable())  # names are chosen by users
            self.terminal.show(f"\r\n[{plain}]\r\n".encode())

    def _show(self, seq: int, data: bytes) -> None:
        self.seq = seq + len(data)
        if self.replay is not None:
            old = data[: max(0, self.live_from - seq)]
            self.terminal.show(self.replay.feed(old))
            data = data[len(old) :]
            self._maybe_live()
        self.terminal.show(data)

    def _maybe_live(self) -> None:
        if self.replay is not None and self.seq >= self.live_from:
            self.terminal.show(self.replay.end())
            self.replay = None
            if screen.is_full_screen(self.terminal.modes):
                self._repaint()

    def _repaint(self) -> None:
        """Make a full-screen program repaint: it does so when its window changes, so change the size, and back."""
        if not self.read_only:
            rows, cols = size_of(self.terminal.display)
            self.channel.resize(max(1, rows - 1), cols)
            self.channel.resize(rows, cols)

    def _from_person(self) -> Outcome | None:
        data = os.read(self.terminal.keyboard, 4096)
        if not data:
            return self._outcome("hangup")
        typed, leave = self.keys.feed(data)
        if typed and not self.read_only:
            self.untyped += typed
            self._type()
        if leave and self.untyped:
            self._say(refusal({"bytes": len(self.untyped)}))
        return self._outcome("detached") if leave else None

    def _type(self) -> None:
        """Send as much of the input as there is room for."""
        if self.resized:
            self._resize()
        while self.untyped and self.channel.has_room():
            self.channel.type(bytes(self.untyped[:STEP]))
            del self.untyped[:STEP]

    def _resize(self) -> None:
        self.resized = not self.read_only and not self.channel.has_room()
        if not self.read_only and not self.resized:
            self.channel.resize(*size_of(self.terminal.display))

    def _outcome(self, kind: Literal["detached", "exited", "lost", "hangup"], detail: Any = None) -> Outcome:
        return Outcome(kind, self.seq, self.lost, detail or {})


class _Terminal:
    """Make the terminal raw while inside; restore it afterwards. If this process is killed, a guard process restores
    it."""

    def __init__(self, keyboard: int, display: int) -> None:
        self.keyboard, self.display = keyboard, display
        self.modes = Modes()
        self._known = self.modes.on()
        self._before = termios.tcgetattr(keyboard)

    def __enter__(self) -> _Terminal:
        watched, self._guard = os.pipe()
        ready, says = os.pipe()
        self._guard_pid = os.fork()
        if self._guard_pid == 0:
            _guard(watched, (self._guard, ready), says, self.keyboard, self.display, self._before)
        os.close(watched)
        os.close(says)
        os.read(ready, 1)  # until the guard is ready, the terminal stays as it is
        os.close(ready)
        self.make_raw()
        return self

    def make_raw(self) -> None:
        tty.setraw(self.keyboard, termios.TCSADRAIN)

    def __exit__(self, *_: object) -> None:
        try:
            termios.tcsetattr(self.keyboard, termios.TCSADRAIN, self._before)
            self._write(screen.reset(self.modes) + b"\r\n")
        except (OSError, termios.error):
            pass  # the terminal itself is gone: there is nothing to restore
        self._tell_guard(b"all is well\n")
        os.close(self._guard)
        os.waitpid(self._guard_pid, 0)

    def _tell_guard(self, line: bytes) -> None:
        try:
            os.write(self._guard, line)
        except BrokenPipeError:
            return  # it was killed; this process is alive, and restores the terminal itself

    def show(self, data: bytes) -> None:
        if not data:
            return
        self.modes.feed(data)
        if self.modes.on() != self._known:
            self._known = self.modes.on()
            self._tell_guard(screen.reset(self.modes).hex().encode() + b"\n")
        self._write(data)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.display, view) :]
            except BlockingIOError:  # an earlier program made it non-blocking: it is full, not gone
                select.select([], [self.display], [])


def _guard(watched: int, theirs: tuple[int, ...], says: int, keyboard: int, display: int, before: list[Any]) -> None:
    """Outlive a killed attach by an instant, as a child process, to restore the terminal."""
    try:
        os.setsid()  # `kill -9 %1` kills the whole job, and this process must not belong to it
        for number in (signal.SIGTTOU, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGTSTP):
            signal.signal(number, signal.SIG_IGN)
        for fd in (*theirs, says):  # closing the last one tells that this process is ready
            os.close(fd)
        undo = b""
        with os.fdopen(watched, "rb") as lines:
            for line in lines:
                if line == b"all is well\n":
                    return
                undo = bytes.fromhex(line.decode())
        raw = not termios.tcgetattr(keyboard)[3] & termios.ISIG
        if raw:  # otherwise another process, a shell with job control, was quicker
            termios.tcsetattr(keyboard, termios.TCSANOW, before)
        os.write(display, undo + b"\r\n")
    finally:
        os._exit(0)


@contextmanager
def _signals(*numbers: signal.Signals) -> Iterator[int]:
    """Yield a descriptor from which the numbers of arriving signals are read."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
