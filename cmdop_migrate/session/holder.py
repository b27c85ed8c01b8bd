"""The process beside one session: keeps its terminal, its output, its inputs and its cgroup.

It must outlive the command line, the terminal and the agent, and stay small:
stdlib only, and no import that is not needed to keep a session. One thread;
nothing here blocks on a client.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable

from cmdop_migrate.events import Events
from cmdop_migrate.session import cgroup, files, launch, wire
from cmdop_migrate.session.clients import Client, Clients
from cmdop_migrate.session.deadman import DeadMan
from cmdop_migrate.session.inputs import Inputs, Journal
from cmdop_migrate.session.ring import Ring

READ_SIZE = 64 << 10
LATE = "its lease was not renewed in time"
FAREWELL = 2.0  # seconds that slow clients get to read the last output
Message = dict[str, object]


class Holder:
    """One session's keeper. `order` is what the starter asked for; `order['record']` is kept on disk by us alone."""

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
        self.clients = Clients(self.epoll, self.ring)
        self.master = -1
        self.pid = 0
        self.last_output = time.time()
        self.kill_at: float | None = None
        self.exit_status: int | None = None
        self.freezer: Client | None = None  # who has the session frozen, to dump it
        self.held: list[tuple[Client, bytes]] = []  # typed while frozen: delivered on waking, or refused
        self.unread = b""  # taken out of the terminal while frozen
        self.committing = False  # the freezer may have parked it, should it leave without a word
        self.parked: str | None = None
        self.why = ""
        self.superseded = ""
        self.pager: launch.Pager | None = None
        until = order.get("fresh_until")
        self.deadman = DeadMan(self.cgroup, None if until is None else float(str(until)), self.on_fence)
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
        listener = wire.listen(str(self.order["socket"]))
        self.listener = listener
        for fd in (master, listener.fileno(), self.wake, self.deadman.fileno()):
            self.epoll.register(fd, select.EPOLLIN)
        self.record.update(phase="live", pid=pid)
        self.save()
        self.deadman.watch()

    def take_over(self, restored: launch.Restored) -> None:
        """A session CRIU has just made anew; its time is kept already."""
        self.adopt(restored.pid, restored.master)
        self.inputs.queue(restored.unwritten)
        self.feed_terminal()
        if restored.pager is not None:
            self.pager = restored.pager
            self.epoll.register(self.pager.fileno(), select.EPOLLIN)
        self.deadman.check()

    def save(self) -> None:
        files.replace_json(f"{self.dir}/session.json", self.record)

    def set_size(self, rows: int, cols: int) -> None:
        if 0 < rows < 4096 and 0 < cols < 4096:
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def loop(self) -> None:
        """Until the session has ended."""
        while self.exit_status is None:
            timeout = -1.0 if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())
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
                else:
                    self.on_client(fd, events)
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.kill_at = None
                cgroup.kill(self.cgroup)

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
        self.last_output = time.time()
        self.clients.pump_all()
        return bool(data)

    def feed_terminal(self) -> None:
        if self.freezer is not None:
            return  # what the terminal holds is being captured
        self.inputs.flush(self.master)
        wanted = select.EPOLLIN | (select.EPOLLOUT if self.inputs.waiting else 0)
        try:
            self.epoll.modify(self.master, wanted)
        except OSError:
            return  # already unregistered: the session is ending
        if not self.inputs.waiting:
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

    def on_fence(self, fenced: bool) -> None:
        """The dead-man switch froze the session, or let it go again. Clients learn why it stands still."""
        event = "fenced" if fenced else "unfenced"
        if not fenced and self.freezer is None:
            cgroup.thaw(self.cgroup)
        at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.clients.tell_all(self.standing())
        late = round((at - (self.deadman.until or 0.0)) * 1000, 3) if fenced else None
        self.note(event, token=self.record["token"], late_ms=late, boottime=round(at, 6))

    def standing(self) -> Message:
        """Why it stands still, or that it does not."""
        event, why = ("fenced", LATE) if self.deadman.fenced else ("unfenced", "its lease is renewed")
        return {"event": event, "why": why, "token": self.record["token"]}

    def on_fresh(self, message: Message) -> Message:
        """The agent's word that the lease is good until then, for this token and no other."""
        if int(str(message["token"])) != self.record["token"]:
            return {"re": "fresh", "error": "token"}
        self.deadman.renewed(float(str(message["until"])), float(str(message["since"])))
        return {"re": "fresh", "fenced": self.deadman.fenced}

    def on_superseded(self, message: Message) -> Message:
        """Another incarnation took over: this one must not take another step."""
        if int(str(message["token"])) <= int(str(self.record["token"])):
            return {"re": "superseded", "error": "token"}
        self.superseded = f"superseded by token {message['token']} on {message['host']}"
        cgroup.kill(self.cgroup)
        return {"re": "superseded"}

    def on_was_parked(self, checkpoint: str) -> Message:
        """The lease store says that our own parking took effect, whoever was to tell us and could not."""
        self.parked, self.freezer = checkpoint, None
        cgroup.kill(self.cgroup)
        return {"re": "parked"}

    def note(self, event: str, **facts: object) -> None:
        try:
            self.events.emit(event, str(self.record["session"]), name=self.record["name"], **facts)
        except OSError as error:
            complain(f"{self.record['session']}: {event}: {error}")

    def on_client(self, fd: int, events: int) -> None:
        client = self.clients.get(fd)
        if client is None:
            return
        if events & select.EPOLLOUT:
            self.clients.pump(client)
        if events & ~select.EPOLLOUT:
            for kind, payload in self.clients.read(client):
                try:
                    if kind == wire.INPUT:
                        self.on_typed(client, payload)
                    else:
                        message = wire.parse_control(payload)
                        self.clients.say(client, self.answer(client, message))
                        if message["op"] == "attach" and self.deadman.fenced:
                            self.clients.say(client, self.standing())
                except (wire.ProtocolError, KeyError, TypeError, ValueError) as error:
                    self.clients.say(client, {"error": "protocol", "message": f"{type(error).__name__}: {error}"})
                    self.clients.drop(client)
                    break
        if self.freezer is not None and self.clients.get(self.freezer.fd) is not self.freezer:
            if self.committing:
                self.deadman.doubt()  # it may exist in the store alone by now: the agent will know
            self.thaw()  # whoever froze it went away without a word: it goes on as if nothing had happened

    def on_typed(self, client: Client, data: bytes) -> None:
        if client.read_only:
            return
        if self.freezer is not None:
            self.hold_back(client, data)
            return
        self.inputs.add(client.actor, data, self.master)
        self.feed_terminal()
        if not self.inputs.has_room(wire.MAX_PAYLOAD // 16):
            self.clients.block(client)

    def answer(self, client: Client, message: Message) -> Message:
        """One request, one answer."""
        op = message["op"]
        if op == "attach":
            return self.on_attach(client, message)
        if op == "resize":
            self.set_size(int(str(message["rows"])), int(str(message["cols"])))
            return {"re": op}
        if op == "send":
            return self.on_send(message)
        if op == "status":
            return {"re": op, **self.status()}
        if op == "fresh":
            return self.on_fresh(message)
        if op == "superseded":
            return self.on_superseded(message)
        if op == "doubt":
            self.deadman.doubt()
            return {"re": op}
        if op == "parked":
            return self.on_was_parked(str(message["checkpoint"]))
        if op == "saved":
            self.record["checkpoint"] = str(message["checkpoint"])
            self.save()
            return {"re": op}
        if op == "freeze":
            return self.on_freeze(client)
        if op == "thaw":
            if client is self.freezer:  # nobody else may let it run while its memory is being read
                self.thaw()
            return {"re": op}
        if op == "typeahead":
            return self.on_typeahead(client)
        if op == "committing":
            self.committing = client is self.freezer
            return {"re": op, "error": None if self.committing else "not frozen by you"}
        if op == "park":
            return self.on_park(client, str(message["checkpoint"]))
        if op == "kill":
            if self.freezer is not None:
                self.clients.drop(self.freezer)  # whoever dumps it finds that out, and gives up
                self.thaw()
            self.end(int(str(message["signal"])), float(str(message["grace"])))
            return {"re": op}
        raise ValueError(f"unknown request {op!r}")

    def on_attach(self, client: Client, message: Message) -> Message:
        client.actor, client.read_only = str(message["actor"]), bool(message.get("read_only"))
        wanted = message.get("from")
        seq = self.ring.start if wanted is None else int(str(wanted))
        if seq > self.ring.end or seq < 0:
            return {"re": "attach", "error": "range", "start": self.ring.start, "end": self.ring.end}
        # A number the ring has left behind: pump() tells the client how much it missed.
        client.cursor = seq
        client.attached = bool(message.get("terminal"))
        if message.get("rows") and not client.read_only:
            self.set_size(int(str(message["rows"])), int(str(message["cols"])))
        return {"re": "attach", "start": self.ring.start, "end": self.ring.end, "modes": self.ring.modes.on()}

    def on_freeze(self, client: Client) -> Message:
        """Stands the session still, for as long as `client` stays connected, and puts its output on disk."""
        if self.freezer is not None or self.pager is not None:
            return {"re": "freeze", "error": "busy"}
        if not cgroup.freeze(self.cgroup):
            if self.deadman.may_run():
                cgroup.thaw(self.cgroup)
            return {"re": "freeze", "error": "stuck"}
        self.freezer = client
        while self.read_all():
            pass
        files.replace(f"{self.dir}/output.ring", self.ring.save(), durable=False)
        unwritten = self.inputs.unwritten().decode("latin-1")
        rows, cols = struct.unpack("HHHH", fcntl.ioctl(self.master, termios.TIOCGWINSZ, b"\0" * 8))[:2]
        return {
            "re": "freeze",
            "pid": self.pid,
            "unwritten": unwritten,
            "rows": rows,
            "cols": cols,
            "end": self.ring.end,
        }

    def on_typeahead(self, client: Client) -> Message:
        """Input that lies in the terminal, unread: for the image, and kept here in case the session goes on."""
        if client is not self.freezer:
            return {"re": "typeahead", "error": "not frozen by you"}
        from cmdop_migrate.session import typeahead  # rarely needed: not loaded by every holder

        self.unread += typeahead.take(self.pid)
        return {"re": "typeahead", "unread": self.unread.decode("latin-1")}

    def thaw(self) -> None:
        """The session goes on where it stood."""
        if self.freezer is None:
            return
        self.freezer, self.committing = None, False
        launch.give_back(self.pid, self.master, self.unread)
        self.unread = b""
        if self.deadman.may_run():
            cgroup.thaw(self.cgroup)
        held, self.held = self.held, []
        for client, data in held:
            self.inputs.add(client.actor, data, self.master)
        self.feed_terminal()

    def on_park(self, client: Client, checkpoint: str) -> Message:
        """The checkpoint is safe in the store: this incarnation ends here."""
        if client is not self.freezer:
            return {"re": "park", "error": "not frozen by you"}
        self.parked, self.why = checkpoint, ""
        self.freezer = None
        cgroup.kill(self.cgroup)
        for one in {one for one, _ in self.held}:
            self.clients.say(one, {"event": "refused", "bytes": sum(len(d) for c, d in self.held if c is one)})
        return {"re": "park"}

    def hold_back(self, client: Client, data: bytes) -> None:
        self.held.append((client, data))
        if sum(len(one) for _, one in self.held) > wire.MAX_PAYLOAD // 4:
            self.clients.block(client)

    def on_send(self, message: Message) -> Message:
        data = str(message["data"]).encode("latin-1")
        if self.freezer is not None:
            return {"re": "send", "error": "checkpointing"}
        if not self.inputs.has_room(len(data)):
            return {"re": "send", "error": "full"}
        at = self.ring.end
        seq = self.inputs.add(str(message["actor"]), data, self.master)
        self.feed_terminal()
        return {"re": "send", "seq": seq, "at": at}

    def status(self) -> Message:
        last = max(self.last_output, self.inputs.last)
        return {
            "record": self.record,
            "frozen": cgroup.is_frozen(self.cgroup),
            "busy": "checkpointing" if self.freezer else "restoring" if self.pager else "",
            "fenced": self.deadman.fenced,
            "fresh_until": self.deadman.until,
            "clients": self.clients.attached(),
            "start": self.ring.start,
            "end": self.ring.end,
            "idle": max(0.0, time.time() - last),
            "holder": os.getpid(),
        }

    def end(self, number: int, grace: float) -> None:
        """Asks the tree to end; what has not ended after `grace` is killed with all its children."""
        if not self.deadman.may_run():
            cgroup.kill(self.cgroup)  # another may hold it: not one more step, not even to say goodbye
            return
        cgroup.thaw(self.cgroup)
        asked = [number]
        if number == signal.SIGTERM:
            asked += [signal.SIGHUP, signal.SIGCONT]  # an interactive shell ignores TERM; HUP is its word for the end
        for pid in cgroup.pids(self.cgroup):
            for one in asked:
                try:
                    os.kill(pid, one)
                except ProcessLookupError:
                    break
        self.kill_at = time.monotonic() + grace

    def finish(self) -> None:
        """The session is over: keep its last words and how it ended, leave nothing running or mounted."""
        while self.read_all():
            pass
        cgroup.remove(self.cgroup)
        status = self.exit_status
        assert status is not None
        code = os.waitstatus_to_exitcode(status)
        reason = f"exited {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        code = code if code >= 0 else 128 - code
        ended: Message = {"code": code, "reason": reason, "at": time.time()}
        if self.parked is not None:
            ended = {"code": None, "reason": self.why or "parked in the store", "checkpoint": self.parked}
            self.record.update(phase="parked", exit=None, pid=None, checkpoint=self.parked)
        else:
            ended["reason"] = self.superseded or ended["reason"]
            self.record.update(phase="exited", exit=ended, pid=None)
        self.keep_record(ended)
        if self.parked is not None or self.superseded:
            launch.remove_files(self.dir)
        self.clients.farewell({"event": "exit", **ended}, FAREWELL)

    def keep_record(self, ended: Message) -> None:
        """Output, event and record, in this order: who sees the end on record finds the rest in place. On a full disk
        what can be written is, and whoever is connected still hears how it ended."""
        words = {"name": self.record["name"], "code": ended["code"], "reason": ended["reason"]}
        steps: list[Callable[[], None]] = [
            lambda: files.replace(f"{self.dir}/output.ring", self.ring.save()),
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


def complain(words: str) -> None:
    """To our log, which may be on the very disk that is full."""
    try:
        os.write(2, words.encode() + b"\n")
    except OSError:
        return


def main() -> None:
    """argv: the package's home, the starter's socket, and the lock that says this session has a keeper:
    it stays open, and so held, until we are gone."""
    control = socket.socket(fileno=int(sys.argv[2]))
    lock = int(sys.argv[3])
    for fd in (control.fileno(), lock):
        os.set_inheritable(fd, False)
    order = wire.parse_control(control.recv(16 << 20))
    os.umask(0o077)
    holder: Holder | None = None
    try:
        cgroup.join(str(order["holders"]))
        holder = Holder(order, control)
        if order["mode"] == "restore":
            holder.take_over(launch.restore(order, control, holder.deadman.begin))
        else:
            holder.adopt(*launch.start(order, control))
            launch.write_token(holder.pid, holder.record["token"])
        launch.tell(control, {"ok": True, "pid": holder.pid, "holder": os.getpid()})
    except Exception as error:  # noqa: BLE001 - a supervisor: whatever it was, the starter hears it and nothing stays
        launch.give_up(order, control, error)
        sys.exit(1)
    if holder.pager is None:
        control.close()
    holder.loop()
    holder.finish()
