"""Run the process beside one session that keeps its terminal, its output, its input and its cgroup.

It must outlive the command line, the terminal and the agent, and stay small: it
imports the standard library only (a contract of import-linter), and nothing that
is not needed to keep a session. One thread runs the loop; nothing in it blocks on
a client. The lease watchdog has a thread of its own. What clients ask is in
`requests`, what they type in `input_admission`, and what this copy of the
session may do in `state`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import termios
import time
from collections.abc import Callable

from cmdop_migrate.events import Events
from cmdop_migrate.holder import cgroup, protocol, requests, start, state, stopped_jobs, syscalls
from cmdop_migrate.holder.clients import Client, Clients
from cmdop_migrate.holder.idle import Idle
from cmdop_migrate.holder.input_admission import InputAdmission
from cmdop_migrate.holder.input_journal import Journal
from cmdop_migrate.holder.input_queue import Inputs
from cmdop_migrate.holder.lease_watchdog import RECHECK_AFTER, LeaseWatchdog
from cmdop_migrate.holder.output_ring import Ring
from cmdop_migrate.holder.terminal import Terminal
from cmdop_migrate.util import atomic, trash

# An interactive shell ignores SIGTERM and ends on SIGHUP. Sent with SIGTERM, SIGHUP would kill programs that handle
# SIGTERM; so it follows after so many seconds.
HANG_UP_AFTER = 0.1
MAX_POLL_TIMEOUT = 86400.0  # seconds: the kernel accepts at most 24 days
FAREWELL_TIMEOUT = 2.0  # seconds that slow clients get to read the last output
Message = dict[str, object]


class Holder:
    """Keep one session: its terminal, output, input and cgroup, and its record on disk."""

    def __init__(self, order: start.Order) -> None:
        self.order = order
        self.record, self.token = order.record, order.token
        self.dir, self.cgroup = order.directory, order.cgroup
        self.state = state.State()
        self.ring = self._load_ring()
        self.inputs = Inputs(Journal(f"{self.dir}/inputs.jsonl"), self.token)
        self.events = Events(os.path.dirname(os.path.dirname(self.dir)), str(self.record["host"]))
        self.epoll = select.epoll()
        self.clients = Clients(self.epoll, self.ring, self.on_left)
        self.pid = 0
        self.idle = Idle(self.cgroup)
        self.terminal = Terminal(self.epoll, self.ring, self.inputs, self.clients, self.idle)
        self.hang_up_at: float | None = None
        self.kill_at: float | None = None
        self.exit_status: int | None = None
        self.pager: start.Pager | None = None
        self.watchdog = LeaseWatchdog(self.cgroup, order.fresh_until, self.on_fence)
        self.admission = InputAdmission(self, order.gate)
        self.wake, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)

    def _load_ring(self) -> Ring:
        try:
            with open(f"{self.dir}/output.ring", "rb") as saved:
                return Ring.load(saved.read(), self.order.ring_size)
        except FileNotFoundError:
            return Ring(self.order.ring_size)

    # The beginning

    def adopt(self, pid: int, master: int) -> None:
        """Take charge of the session: from now on its terminal is read, its end noticed, and its record says live."""
        self.pid = pid
        self.terminal.open(master)
        if self.order.size is not None:
            self.terminal.set_size(self.order.size.rows, self.order.size.cols)
        self.listener = protocol.listen(self.order.socket)
        for fd in (self.listener.fileno(), self.wake, self.watchdog.fileno()):
            self.epoll.register(fd, select.EPOLLIN)
        self.record.update(phase="live", pid=pid)
        self.save()
        self.watchdog.watch()

    def take_over(self, restored: start.Restored) -> None:
        """Take charge of a session that CRIU has restored; the lease watchdog watches its deadline already."""
        self.adopt(restored.pid, restored.master)
        self.inputs.queue(restored.unwritten)
        self.inputs.stage(restored.staged)
        self.admission.streams.load(restored.streams)
        self.admission.streams.begin(self.token, self.ring.end)
        if self.order.carried is not None:
            self.admission.load(self.order.carried)
        self.feed_terminal()
        if restored.pager is not None:
            self.pager = restored.pager
            self.epoll.register(self.pager.fileno(), select.EPOLLIN)
        self.watchdog.check()

    def save(self) -> None:
        """Write the record. Raise OSError if the disk is full."""
        atomic.replace_json(f"{self.dir}/session.json", self.record)

    # The loop

    def loop(self) -> None:
        """Run until the session has ended."""
        while self.exit_status is None:
            times = (self.kill_at, self.hang_up_at, self.admission.deadline(), self._refreeze())
            soonest = min((moment for moment in times if moment is not None), default=None)
            timeout = -1.0 if soonest is None else min(max(0.0, soonest - time.monotonic()), MAX_POLL_TIMEOUT)
            for fd, events in self.epoll.poll(timeout):
                self._on_ready(fd, events)
            self.admission.on_time()
            if self.hang_up_at is not None and time.monotonic() >= self.hang_up_at:
                self.hang_up_at = None
                self._signal(signal.SIGHUP)
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.kill_at = None
                cgroup.kill(self.cgroup)

    def _on_ready(self, fd: int, events: int) -> None:
        gate = self.admission.gate
        if fd == self.terminal.master:
            if events & select.EPOLLOUT:
                self.feed_terminal()
            if events & ~select.EPOLLOUT:
                self.terminal.on_readable()
        elif fd == self.listener.fileno():
            self.clients.accept(self.listener)
        elif fd == self.wake:
            self.on_signal()
        elif fd == self.watchdog.fileno():
            self.watchdog.on_timer()
        elif self.pager is not None and fd == self.pager.fileno():
            self.on_pager()
        elif gate is not None and fd == gate.fileno():
            gate.on_output()
        else:
            self.on_client(fd, events)

    def _refreeze(self) -> float | None:
        """Order the freeze again while a fenced session is being dumped, and return when to do so next: CRIU thaws the
        cgroup it dumps, and may die and release the processes."""
        if self.state.owner is None or not self.watchdog.fenced:
            return None
        cgroup.order_freeze(self.cgroup)
        return time.monotonic() + RECHECK_AFTER

    def on_client(self, fd: int, events: int) -> None:
        """Read what a client sent and send what it has room for."""
        client = self.clients.get(fd)
        if client is None:
            return
        if events & select.EPOLLOUT:
            self.clients.pump(client)
        if events & ~select.EPOLLOUT:
            self.watchdog.check()  # a client is served by the only copy that runs, or by a frozen one
            for kind, payload in self.clients.read(client):
                try:
                    self._on_frame(client, kind, payload)
                except (protocol.ProtocolError, KeyError, TypeError, ValueError) as error:
                    self.clients.say(client, {"error": "protocol", "message": f"{type(error).__name__}: {error}"})
                    self.clients.drop(client)
                    break
        self.admission.forget_gone()
        self.release_if_owner_gone()

    def _on_frame(self, client: Client, kind: int, payload: bytes) -> None:
        if kind == protocol.INPUT:
            self.admission.receive(client, payload)
            return
        message = protocol.parse_control(payload)
        answer = requests.answer(self, client, message)
        if answer is not None:
            self.clients.say(client, answer)
        if message["op"] == "attach":
            if self.watchdog.fenced:
                self.clients.say(client, self._fence_event())
            if self.admission.turn.holder is not None:
                self.clients.say(client, {"event": "turn", "do": "show", **self.admission.describe()})

    def on_signal(self) -> None:
        """React to SIGTERM and SIGCHLD."""
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
            elif self.admission.gate is not None:
                self.admission.gate.on_exit(pid, status)

    def on_pager(self) -> None:
        """Note the end of a lazy restore: all memory is in place, or the restorer died before it was. Then the session
        is killed, because its processes must not run with holes in their memory."""
        assert self.pager is not None
        self.epoll.unregister(self.pager.fileno())
        if not self.pager.is_complete():
            cgroup.kill(self.cgroup)
            why = "its memory could not be restored completely"
            self.state = state.after(
                self.state, state.Event.MEMORY_LOST, checkpoint=str(self.record["checkpoint"]), why=why
            )
        self.pager.close()
        self.pager = None

    def feed_terminal(self) -> None:
        """Write the waiting input to the terminal, unless its content is being captured."""
        if not self.state.withholds_input:
            self.terminal.feed()

    # Freezing and resuming

    def on_fence(self, fenced: bool) -> None:
        """Note that the lease watchdog froze the session, or released it. Tell clients why it is frozen."""
        if self.state.mode is state.Mode.HANDED_OVER:
            return  # it is frozen for another reason, and stays so
        if not fenced:
            self.idle.touch()  # it could not work until now
            if self.state.owner is not None:
                # CRIU thaws the cgroup that it dumps, because its own code runs in the processes: frozen again in the
                # middle of that, it continues only if it is thawed.
                if cgroup.is_traced(self.cgroup):
                    cgroup.thaw(self.cgroup)
            elif not self.admission.turn.frozen and not self.state.is_over:
                cgroup.thaw(self.cgroup)
        at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.clients.tell_all(self._fence_event())
        late = round((at - (self.watchdog.until or 0.0)) * 1000, 3) if fenced else None
        self.note("fenced" if fenced else "unfenced", token=self.token, late_ms=late, boottime=round(at, 6))

    def _fence_event(self) -> Message:
        if self.watchdog.fenced:
            return {"event": "fenced", "why": "its lease was not renewed in time", "token": self.token}
        return {"event": "unfenced", "why": "its lease is renewed", "token": self.token}

    def release_if_owner_gone(self) -> None:
        """Resume a session whose checkpoint command closed its connection without a thaw, a park or a hand-over."""
        if self.state.owner is None or self.clients.find(self.state.owner) is not None:
            return
        if self.state.mode is state.Mode.COMMITTING:
            self.watchdog.doubt()  # it may be parked in the store by now: it stays frozen until the agent knows
        self.state = state.after(self.state, state.Event.OWNER_GONE)
        self.resume()

    def resume(self) -> None:
        """Undo what a dump did to the session, thaw it if lease and turn allow, and apply the withheld input."""
        try:
            start.give_back(self.pid, self.terminal.master, self.terminal.unread)
        except (OSError, termios.error) as error:  # the input that was typed ahead is lost; the session is not
            self.complain(f"what was typed ahead cannot be given back: {error}")
        self.terminal.unread = b""
        stopped_jobs.put_back(self.dir, self.cgroup)  # does nothing unless a dump was killed
        self.idle.pass_over()
        if not self.thaw_if_allowed():
            cgroup.order_freeze(self.cgroup)  # a CRIU that died has left it thawed
        self.admission.deliver_withheld()
        self.feed_terminal()

    def thaw_if_allowed(self) -> bool:
        """Thaw the session and return True, unless the lease watchdog or a seized write turn keeps it frozen."""
        if not self.watchdog.may_run() or self.admission.turn.frozen:
            return False
        cgroup.thaw(self.cgroup)
        return True

    # Events

    def note(self, event: str, **facts: object) -> None:
        """Add an event to the host's log; on a full disk, complain instead."""
        try:
            self.events.emit(event, str(self.record["session"]), name=self.record["name"], **facts)
        except OSError as error:
            self.complain(f"{event}: {error}")

    def complain(self, words: str) -> None:
        """Write a line to the holder's own log, unless that is on the disk that is full."""
        try:
            os.write(2, f"{self.record['session']}: {words}\n".encode())
        except OSError:
            return

    def on_left(self, client: Client) -> None:
        """Note that an attached terminal's connection closed."""
        facts = {"actor": client.actor, "pid": self.pid, "token": self.token}
        self.admission.note("detached", **facts, to=client.cursor, lost=client.lost)

    # The end

    def end(self, number: int, grace: float) -> None:
        """Send a signal to all processes; kill those that have not ended after `grace` seconds. A session that may be
        elsewhere is killed immediately: it must not run one more instruction, not even to handle a signal."""
        if number == signal.SIGKILL or self.state.may_be_elsewhere or not self.watchdog.may_run():
            cgroup.kill(self.cgroup)
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
        """Keep the last output and how the session ended; leave nothing running or mounted."""
        self.terminal.read_all()
        cgroup.remove(self.cgroup)
        start.cut_cable(self.record.get("link"))
        ended = self._ending()
        self._keep_record(ended)
        if self.state.left is not None or "checkpoint" in ended:
            start.remove_files(self.dir)
        self.clients.farewell({"event": "exit", **ended}, FAREWELL_TIMEOUT)

    def _ending(self) -> Message:
        """Put how the session ended into the record, and return it as clients are told."""
        assert self.exit_status is not None
        code = os.waitstatus_to_exitcode(self.exit_status)
        name = syscalls.signal_name(-code) if code < 0 else ""
        end = state.ending(self.state, code if code >= 0 else 128 - code, code < 0)
        if end.checkpoint is not None or end.kind is None:
            self.record.update(phase="parked", exit=None, pid=None, checkpoint=end.checkpoint)
            return {"code": None, "reason": end.reason, "checkpoint": end.checkpoint}
        reason = end.reason or protocol.exit_reason(end.kind, code=code, signal=name)
        told: Message = {"code": end.code, "reason": reason, "at": time.time(), "kind": end.kind}
        told.update(to=end.to, token=end.token)
        self.record.update(phase="exited", exit=told, pid=None)
        return told

    def _keep_record(self, ended: Message) -> None:
        """Write output, event and record, in this order: a reader that sees the end in the record finds the rest in
        place. On a full disk, write what can be written; connected clients are told the end in any case."""
        event = "parked" if "checkpoint" in ended else "exited"
        facts = {"name": self.record["name"], "code": ended["code"], "reason": ended["reason"]}
        steps: list[Callable[[], None]] = [
            lambda: atomic.replace(f"{self.dir}/output.ring", self.ring.save()),
            lambda: self.events.emit(event, str(self.record["session"]), **facts),
            self.save,
            lambda: os.unlink(self.order.socket),
        ]
        for step in steps:
            try:
                step()
            except OSError as error:
                self.complain(str(error))


def main() -> None:
    """Start or restore a session as the starter ordered, and keep it until it ends. argv: the package's parent
    directory, the starter's socket, and the lock that says that this session has a holder: it is held until the end."""
    control = socket.socket(fileno=int(sys.argv[2]))
    lock = int(sys.argv[3])
    for fd in (control.fileno(), lock):
        os.set_inheritable(fd, False)
    message = protocol.parse_control(control.recv(16 << 20))
    os.umask(0o077)
    try:
        order = start.Order(message)
        cgroup.join(order.holders)
        holder = Holder(order)
        if order.is_restore:
            holder.take_over(start.restore(message, control, holder.watchdog.begin))
        else:
            holder.adopt(*start.start(message, control))
            start.write_token(holder.pid, holder.token)
        start.tell(control, {"ok": True, "pid": holder.pid, "holder": os.getpid()})
    except Exception as error:  # noqa: BLE001 - a supervisor: the starter gets every error, and nothing stays
        start.give_up(message, control, error)
        sys.exit(1)
    if holder.pager is None:
        control.close()
    holder.loop()
    holder.finish()
    os.close(lock)  # a restore on this host need not wait until the files are removed
    trash.remove_later(trash.of_session(holder.dir))
