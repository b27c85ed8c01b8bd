"""What every holder does whoever asks for what: reads the terminal, notices the end, leaves nothing behind.

One thread; nothing here blocks on a client. Stdlib only: the holder loads this.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import termios
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from cmdop_migrate.events import Events
from cmdop_migrate.holder import cgroup, protocol, syscalls
from cmdop_migrate.holder import start as holder_start
from cmdop_migrate.holder.clients import Client, Clients
from cmdop_migrate.holder.idle import Idle
from cmdop_migrate.holder.input_admission import Writers
from cmdop_migrate.holder.input_journal import Journal
from cmdop_migrate.holder.input_queue import Inputs
from cmdop_migrate.holder.lease_watchdog import LOOK_AGAIN, DeadMan
from cmdop_migrate.holder.output_ring import Ring
from cmdop_migrate.holder.typed import Typed
from cmdop_migrate.util import atomic

READ_SIZE = 64 << 10
# An interactive shell ignores SIGTERM; SIGHUP is its word for the end. At the same time, others would die of that.
HANG_UP_AFTER = 0.1
LONGEST_WAIT = 86400.0  # in one go: the kernel takes no more than 24 days
FAREWELL = 2.0  # seconds that slow clients get to read the last output
Message = dict[str, object]


class Keeper(ABC):
    """One session's terminal, output, inputs and cgroup. `order` is what the starter asked for; `order['record']` is
    kept on disk by us alone. `Holder` adds what clients may ask."""

    def __init__(self, order: Message, control: socket.socket) -> None:
        record = order["record"]
        assert isinstance(record, dict)
        self.order, self.control = order, control
        self.record: Message = record
        self.dir, self.cgroup = str(order["dir"]), str(order["cgroup"])
        self.ring = self._ring()
        self.inputs = Inputs(Journal(f"{self.dir}/inputs.jsonl"), int(str(record["token"])))
        self.events = Events(os.path.dirname(os.path.dirname(self.dir)), str(record["host"]))
        self.epoll = select.epoll()
        self.clients = Clients(self.epoll, self.ring, self.on_left)
        self.master = -1
        self.pid = 0
        self.idle = Idle(self.cgroup)
        self.printed_at = 0.0
        self.hang_up_at: float | None = None
        self.kill_at: float | None = None
        self.exit_status: int | None = None
        self.freezer: Client | None = None  # who has the session frozen, to dump it
        self.unread = b""  # taken out of the terminal while frozen
        self.committing = False  # the freezer may have parked it, or may have had when it left without a word
        self.unwanted = False  # a person ended it just then
        self.handing: str | None = None  # the checkpoint that another host may have running: no thaw without the lease
        self.first_output: float | None = None  # CLOCK_BOOTTIME; of this incarnation
        self.parked: str | None = None
        self.why = ""
        self.left: Message | None = None  # this copy must not run: why, and where the session is (model.Exit)
        self.pager: holder_start.Pager | None = None
        until = order.get("fresh_until")
        self.deadman = DeadMan(self.cgroup, None if until is None else float(str(until)), self.on_fence)
        self.typed = Typed(self)
        self.writers = Writers(self)
        self.wake, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)

    def _ring(self) -> Ring:
        size = int(str(self.order["ring"]))
        try:
            with open(f"{self.dir}/output.ring", "rb") as saved:
                return Ring.load(saved.read(), size)
        except FileNotFoundError:
            return Ring(size)

    def adopt(self, pid: int, master: int) -> None:
        """From here on the session is ours: its terminal is read, its death is noticed, it is on record."""
        self.pid, self.master = pid, master
        os.set_blocking(master, False)
        if "rows" in self.order:
            self.set_size(int(str(self.order["rows"])), int(str(self.order["cols"])))
        listener = protocol.listen(str(self.order["socket"]))
        self.listener = listener
        for fd in (master, listener.fileno(), self.wake, self.deadman.fileno()):
            self.epoll.register(fd, select.EPOLLIN)
        self.record.update(phase="live", pid=pid)
        self.save()
        self.deadman.watch()

    def take_over(self, restored: holder_start.Restored) -> None:
        """A session CRIU has just made anew; its time is kept already."""
        self.adopt(restored.pid, restored.master)
        self.inputs.queue(restored.unwritten)
        self.inputs.stage(restored.staged)
        self.typed.streams.load(restored.streams)
        self.typed.streams.begin(int(str(self.record["token"])), self.ring.end)
        carried = self.order.get("carried")
        if isinstance(carried, dict):
            self.writers.load(carried)
        self.feed_terminal()
        if restored.pager is not None:
            self.pager = restored.pager
            self.epoll.register(self.pager.fileno(), select.EPOLLIN)
        self.deadman.check()

    def save(self) -> None:
        atomic.replace_json(f"{self.dir}/session.json", self.record)

    def set_size(self, rows: int, cols: int) -> None:
        if 0 < rows < 4096 and 0 < cols < 4096:
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def loop(self) -> None:
        """Until the session has ended."""
        while self.exit_status is None:
            times = (self.kill_at, self.hang_up_at, self.writers.deadline(), self._refreeze())
            soonest = min((one for one in times if one is not None), default=None)
            timeout = -1.0 if soonest is None else min(max(0.0, soonest - time.monotonic()), LONGEST_WAIT)
            for fd, events in self.epoll.poll(timeout):
                if fd == self.master:
                    self.on_terminal(events)
                elif fd == self.listener.fileno():
                    self.clients.accept(self.listener)
                elif fd == self.wake:
                    self.on_signal()
                elif fd == self.deadman.fileno():
                    self.deadman.on_timer()
                elif self.pager is not None and fd == self.pager.fileno():
                    self.on_pager()
                elif self.writers.gate is not None and fd == self.writers.gate.fileno():
                    self.writers.gate.on_output()
                else:
                    self.on_client(fd, events)
            self.writers.on_time()
            if self.hang_up_at is not None and time.monotonic() >= self.hang_up_at:
                self.hang_up_at = None
                self._signal(signal.SIGHUP)
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.kill_at = None
                cgroup.kill(self.cgroup)

    def _refreeze(self) -> float | None:
        """Past its time CRIU, which is dumping it, may thaw it; and die, and let it go. -> when to look again."""
        if self.freezer is None or not self.deadman.fenced:
            return None
        cgroup.order_freeze(self.cgroup)
        return time.monotonic() + LOOK_AGAIN

    def on_terminal(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self.feed_terminal()
        if events & ~select.EPOLLOUT and not self.read_terminal():
            self.epoll.unregister(self.master)  # the slave side is gone; the tree's end is told by SIGCHLD

    def read_terminal(self) -> bool:
        """Takes what the session printed, at once, whoever is or is not listening. False at its end."""
        try:
            data = os.read(self.master, READ_SIZE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.ring.append(data)
        self.idle.touch()
        self.printed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self.first_output is None:
            self.first_output = self.printed_at
        self.clients.pump_all()
        return bool(data)

    @property
    def stands_still(self) -> bool:
        """Frozen by a person's wish, and so nothing goes in: it is being dumped, or handed over. Or it is being ended
        here, to go on elsewhere: what went in now would be lost, and taken for applied."""
        return self.freezer is not None or self.handing is not None or self.is_left

    @property
    def is_left(self) -> bool:
        """This copy is of no more use."""
        return self.parked is not None or self.left is not None

    def feed_terminal(self) -> None:
        if self.stands_still:
            return  # what the terminal holds is being captured
        self.inputs.flush(self.master)
        wanted = select.EPOLLIN | (select.EPOLLOUT if self.inputs.waiting else 0)
        try:
            self.epoll.modify(self.master, wanted)
        except OSError:
            return  # already unregistered: the session is ending
        if self.inputs.is_empty:
            self.clients.unblock()

    def on_signal(self) -> None:
        numbers = os.read(self.wake, 512)
        if signal.SIGTERM in numbers:
            self.end(signal.SIGTERM, 5.0)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.exit_status = status
            elif self.writers.gate is not None:
                self.writers.gate.on_exit(pid, status)

    def on_pager(self) -> None:
        """The restorer has put all memory in place, or is gone before it had: then nothing may run on with holes."""
        assert self.pager is not None
        self.epoll.unregister(self.pager.fileno())
        if not self.pager.is_complete():
            cgroup.kill(self.cgroup)
            self.parked = str(self.record["checkpoint"])
            self.why = "its memory could not be brought back whole"
        self.pager.close()
        self.pager = None

    def note(self, event: str, **facts: object) -> None:
        try:
            self.events.emit(event, str(self.record["session"]), name=self.record["name"], **facts)
        except OSError as error:
            complain(f"{self.record['session']}: {event}: {error}")

    def on_joined(self, client: Client, start: int) -> None:
        """A terminal was attached, to be shown all from byte `start`. On record: it is the same process as before, what
        it gets of what was printed meanwhile, and what is no longer kept."""
        lost = max(0, self.ring.start - start)
        shown = {"from": start, "replayed": self.ring.end - start - lost, "lost": lost}
        facts = {"actor": client.actor, "read_only": client.read_only, "pid": self.pid, "token": self.record["token"]}
        self.writers.note("attached", **facts, **shown)

    def on_left(self, client: Client) -> None:
        facts = {"actor": client.actor, "pid": self.pid, "token": self.record["token"]}
        self.writers.note("detached", **facts, to=client.cursor, lost=client.lost)

    def end(self, number: int, grace: float) -> None:
        """Asks the tree to end; what has not ended after `grace` is killed with all its children."""
        is_doubtful = self.handing is not None or self.committing or not self.deadman.may_run()
        if number == signal.SIGKILL or is_doubtful:
            cgroup.kill(self.cgroup)  # another may hold it: not one more step, not even to say goodbye
            return
        cgroup.thaw(self.cgroup)
        self._signal(number)
        if number == signal.SIGTERM:
            self._signal(signal.SIGCONT)
            self.hang_up_at = time.monotonic() + HANG_UP_AFTER
        self.kill_at = time.monotonic() + grace

    def _signal(self, number: int) -> None:
        for pid in cgroup.pids(self.cgroup):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def finish(self) -> None:
        """The session is over: keep its last words and how it ended, leave nothing running or mounted."""
        while self.read_all():
            pass
        cgroup.remove(self.cgroup)
        holder_start.cut_cable(self.record.get("link"))
        status = self.exit_status
        assert status is not None
        code = os.waitstatus_to_exitcode(status)
        ended: Message = {"code": code, "kind": "exited", "reason": protocol.exit_reason("exited", code=code)}
        if code < 0:
            reason = protocol.exit_reason("killed", signal=syscalls.signal_name(-code))
            ended = {"code": 128 - code, "kind": "killed", "reason": reason}
        ended["at"] = time.time()
        code = int(str(ended["code"]))
        if self.handing is not None and self.left is None:
            self.parked = self.handing  # whoever ended it: that checkpoint is all there is of it here
        if self.parked is not None:
            ended = {"code": None, "reason": self.why or "parked in the store", "checkpoint": self.parked}
            self.record.update(phase="parked", exit=None, pid=None, checkpoint=self.parked)
        else:
            if self.committing:
                ended.update(kind="parking_unknown", reason=protocol.exit_reason("parking_unknown"), code=None)
            if self.unwanted:
                ended.update(kind="kill_pending", reason=protocol.exit_reason("kill_pending"))
            if self.left is not None:
                ended.update(self.left, code=None if self.handing else code)
            self.record.update(phase="exited", exit=ended, pid=None)
        self.keep_record(ended)
        if self.parked is not None or self.left is not None:
            holder_start.remove_files(self.dir)
        self.clients.farewell({"event": "exit", **ended}, FAREWELL)

    def keep_record(self, ended: Message) -> None:
        """Output, event and record, in this order: who sees the end on record finds the rest in place. On a full disk
        what can be written is, and whoever is connected still hears how it ended."""
        words = {"name": self.record["name"], "code": ended["code"], "reason": ended["reason"]}
        steps: list[Callable[[], None]] = [
            lambda: atomic.replace(f"{self.dir}/output.ring", self.ring.save()),
            lambda: self.events.emit("parked" if self.parked else "exited", str(self.record["session"]), **words),
            self.save,
            lambda: os.unlink(str(self.order["socket"])),
        ]
        for step in steps:
            try:
                step()
            except OSError as error:
                complain(f"{self.record['session']}: {error}")

    def read_all(self) -> bool:
        before = self.ring.end
        return self.read_terminal() and self.ring.end > before

    @abstractmethod
    def on_client(self, fd: int, events: int) -> None:
        """A connection has something for us, or room for more."""

    @abstractmethod
    def on_fence(self, fenced: bool) -> None:
        """The dead-man switch froze the session, or let it go again."""


def complain(words: str) -> None:
    """To our log, which may be on the very disk that is full."""
    try:
        os.write(2, words.encode() + b"\n")
    except OSError:
        return
