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

from cmdop_migrate.holder import cgroup, protocol, start, stopped_jobs
from cmdop_migrate.holder.clients import Client
from cmdop_migrate.holder.keeper import Keeper, Message, complain
from cmdop_migrate.util import atomic, trash

LATE = "its lease was not renewed in time"


class Holder(Keeper):
    """A session's keeper, and its answers."""

    def on_fence(self, fenced: bool) -> None:
        """The dead-man switch froze the session, or let it go again. Clients learn why it stands still."""
        event = "fenced" if fenced else "unfenced"
        if self.handing is not None:
            return  # it stands still anyway, and not for want of a renewal
        if not fenced:
            self.idle.touch()  # it could do nothing so far
            # CRIU thaws what it has in its hands, for its own code runs in it: stopped in there, it goes on.
            if cgroup.is_traced(self.cgroup) if self.freezer is not None else not self.writers.turn.frozen:
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
        self.deadman.renewed(protocol.seconds(message["until"]), protocol.seconds(message["since"]))
        if self.freezer is None and not self.deadman.fenced:
            self.committing = False  # whoever was at it is gone, and it is not parked
        self.idle.look()
        idle = 0.0 if self.clients.attached() else self.idle_for()
        return {"re": "fresh", "fenced": self.deadman.fenced, "idle": round(idle, 1)}

    def on_superseded(self, message: Message) -> Message:
        """Another incarnation took over: this one must not take another step."""
        if int(str(message["token"])) <= int(str(self.record["token"])):
            return {"re": "superseded", "error": "token"}
        to, token = str(message["host"]), int(str(message["token"]))
        reason = protocol.exit_reason("superseded", to=to, token=token)
        self.left = {"kind": "superseded", "to": to, "token": token, "reason": reason}
        cgroup.kill(self.cgroup)
        return {"re": "superseded"}

    def on_was_parked(self, checkpoint: str) -> Message:
        """The lease store says that our own parking took effect, whoever was to tell us and could not."""
        self.parked, self.freezer = None if self.unwanted else checkpoint, None
        cgroup.kill(self.cgroup)
        return {"re": "parked"}

    def on_client(self, fd: int, events: int) -> None:
        client = self.clients.get(fd)
        if client is None:
            return
        if events & select.EPOLLOUT:
            self.clients.pump(client)
        if events & ~select.EPOLLOUT:
            self.deadman.check()  # whoever comes here comes to the one copy there is, or to one that stands still
            for kind, payload in self.clients.read(client):
                try:
                    if kind == protocol.INPUT:
                        self.typed.take(client, payload)
                    else:
                        message = protocol.parse_control(payload)
                        answer = self.answer(client, message)
                        if answer is not None:  # else it comes later
                            self.clients.say(client, answer)
                        if message["op"] == "attach" and self.deadman.fenced:
                            self.clients.say(client, self.standing())
                        if message["op"] == "attach" and self.writers.turn.holder is not None:
                            self.clients.say(client, {"event": "turn", "do": "show", **self.writers.describe()})
                except (protocol.ProtocolError, KeyError, TypeError, ValueError) as error:
                    self.clients.say(client, {"error": "protocol", "message": f"{type(error).__name__}: {error}"})
                    self.clients.drop(client)
                    break
        self.writers.forget_gone()
        if self.freezer is not None and self.clients.get(self.freezer.fd) is not self.freezer:
            self.let_go()  # whoever froze it went away without a word: it goes on as if nothing had happened

    def answer(self, client: Client, message: Message) -> Message | None:
        """One request, one answer; None when it comes later."""
        op = message["op"]
        if op == "attach":
            return self.on_attach(client, message)
        if op == "type":
            return self.typed.take_numbered(client, int(str(message["at"])), str(message["data"]).encode("latin-1"))
        if op == "resize":
            self.set_size(int(str(message["rows"])), int(str(message["cols"])))
            return {"re": op}
        if op == "send":
            return self.typed.send(client, message)
        if op == "turn":
            return self.writers.answer(client, message)
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
            return self.on_saved(str(message["checkpoint"]))
        if op == "freeze":
            return self.on_freeze(client, message.get("only_idle"))
        if op == "thaw":
            if client is self.freezer:  # nobody else may let it run while its memory is being read
                self.thaw()
            return {"re": op}
        if op == "typeahead":
            return self.on_typeahead(client)
        if op == "committing":
            self.committing = client is self.freezer
            return {"re": op, "error": None if self.committing else "not frozen by you"}
        if op == "hand_over":
            return self.on_hand_over(client, str(message["checkpoint"]))
        if op == "take_back":
            return self.on_take_back(message)
        if op == "moved":
            return self.on_moved(message)
        if op == "park":
            return self.on_park(client, str(message["checkpoint"]))
        if op == "kill":
            number, grace = int(str(message["signal"])), protocol.seconds(message["grace"])
            if number not in signal.valid_signals():
                raise ValueError(f"no such signal: {number}")
            if not self.is_idle(message.get("only_idle")):
                return {"re": op, "error": "active"}
            if self.freezer is not None:
                self.clients.drop(self.freezer)  # whoever dumps it finds that out, and gives up
                self.let_go()
            self.end(number, grace)
            self.unwanted, self.committing = self.unwanted or self.committing, False  # it has ended, wherever it stood
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
        if client.attached:
            self.on_joined(client, seq)
        answer: Message = {"re": "attach", "start": self.ring.start, "end": self.ring.end}
        if message.get("token") is not None:
            answer["since"] = self.typed.streams.since(int(str(message["token"])))
        if message.get("stream") is not None:
            client.stream = str(message["stream"])
            answer["applied"] = self.typed.streams.open(client.stream)
        return {**answer, "modes": self.ring.modes.on()}

    def on_freeze(self, client: Client, only_idle: object = None) -> Message:
        """Stands the session still, for as long as `client` stays connected, and puts its output on disk."""
        if self.stands_still or self.pager is not None:
            return {"re": "freeze", "error": "busy"}
        self.idle.look()
        if not self.is_idle(only_idle):
            return {"re": "freeze", "error": "active"}
        if not cgroup.freeze(self.cgroup):
            if self.deadman.may_run() and not self.writers.turn.frozen:
                cgroup.thaw(self.cgroup)
            return {"re": "freeze", "error": "stuck"}
        self.freezer, self.committing = client, False
        self.writers.stop()
        while self.read_all():
            pass
        try:
            atomic.replace(f"{self.dir}/output.ring", self.ring.save(), durable=False)
        except OSError as error:
            self.thaw()
            return {"re": "freeze", "error": "disk", "why": str(error)}
        rows, cols = struct.unpack("HHHH", fcntl.ioctl(self.master, termios.TIOCGWINSZ, b"\0" * 8))[:2]
        return {
            "re": "freeze",
            "pid": self.pid,
            "unwritten": "",  # what waits is in `queued` with its authors; older hosts read this
            "staged": self.inputs.staged(),
            "streams": self.typed.streams.save(),
            **self.writers.save(),
            "rows": rows,
            "cols": cols,
            "end": self.ring.end,
            "printed_at": self.printed_at,
        }

    def on_saved(self, checkpoint: str) -> Message:
        """A copy of it is in the store, and it runs on. On a full disk the record names it with its next change."""
        self.record["checkpoint"] = checkpoint
        try:
            self.save()
        except OSError as error:
            complain(f"{self.record['session']}: {error}")
        return {"re": "saved"}

    def on_typeahead(self, client: Client) -> Message:
        """Input that lies in the terminal, unread: for the image, and kept here in case the session goes on."""
        if client is not self.freezer:
            return {"re": "typeahead", "error": "not frozen by you"}
        if not cgroup.is_to_freeze(self.cgroup):
            return {"re": "typeahead", "error": "somebody has thawed it"}
        from cmdop_migrate.holder import typeahead  # rarely needed: not loaded by every holder

        try:
            self.unread += typeahead.take(self.pid)
        except (OSError, termios.error) as error:  # it may have unmounted its /dev, or put another in its place
            return {"re": "typeahead", "error": f"its terminal cannot be read: {error}"}
        return {"re": "typeahead", "unread": self.unread.decode("latin-1")}

    def let_go(self) -> None:
        """The freezer is not heard any more."""
        committing = self.committing
        if committing:
            self.deadman.doubt()  # it may exist in the store alone by now: the agent will know
        self.thaw()
        self.committing = committing

    def thaw(self) -> None:
        """The session goes on where it stood."""
        if self.freezer is None:
            return
        self.freezer, self.committing = None, False
        self.go_on()

    def go_on(self) -> None:
        try:
            start.give_back(self.pid, self.master, self.unread)
        except (OSError, termios.error) as error:  # what was typed ahead is lost; the session is not
            complain(f"{self.record['session']}: what was typed ahead cannot be given back: {error}")
        self.unread = b""
        stopped_jobs.put_back(self.dir, self.cgroup)  # does nothing unless a dump was killed
        self.idle.pass_over()
        if self.deadman.may_run() and not self.writers.turn.frozen:
            cgroup.thaw(self.cgroup)
        else:
            cgroup.order_freeze(self.cgroup)  # a CRIU that died has left it thawed
        self.typed.deliver_held()
        self.feed_terminal()

    def on_park(self, client: Client, checkpoint: str) -> Message:
        """The checkpoint is safe in the store: this incarnation ends here."""
        if client is not self.freezer:
            return {"re": "park", "error": "not frozen by you"}
        self.parked, self.why = checkpoint, ""
        self.freezer = None
        cgroup.kill(self.cgroup)
        self.typed.refuse_held()
        return {"re": "park"}

    def on_hand_over(self, client: Client, checkpoint: str) -> Message:
        """Another host may have this checkpoint running from now on: whoever comes and goes here, this copy stands
        still until someone who holds the lease takes it back, or says that it moved."""
        if client is not self.freezer:
            return {"re": "hand_over", "error": "not frozen by you"}
        before = {key: self.record.get(key) for key in ("phase", "checkpoint")}
        self.record.update(phase="handing", checkpoint=checkpoint)
        try:
            self.save()
        except OSError as error:
            self.record.update(before)
            return {"re": "hand_over", "error": f"it cannot be put on record: {error}"}
        self.handing, self.freezer = checkpoint, None
        return {"re": "hand_over"}

    def on_take_back(self, message: Message) -> Message:
        """The lease is this host's again, under this token: it goes on here."""
        token = int(str(message["token"]))
        if self.handing is None or token < int(str(self.record["token"])):
            return {"re": "take_back", "error": "it is not being handed over, or under a higher token"}
        before = {key: self.record.get(key) for key in ("phase", "token")}
        self.record.update(phase="live", token=token)
        try:
            self.save()
        except OSError as error:
            self.record.update(before)
            return {"re": "take_back", "error": f"it cannot be put on record: {error}"}
        start.write_token(self.pid, token)
        self.deadman.renewed(protocol.seconds(message["until"]), protocol.seconds(message["since"]))
        self.handing, self.inputs.token = None, token
        self.typed.streams.begin(token, self.ring.end)
        self.go_on()
        return {"re": "take_back"}

    def on_moved(self, message: Message) -> Message:
        """It goes on elsewhere: this copy is of no more use."""
        if self.handing is None:
            return {"re": "moved", "error": "it is not being handed over"}
        to, token = message.get("to"), message.get("token")  # absent from a client of an older version
        self.left = {"kind": "moved", "to": to, "token": token, "reason": str(message["why"])}
        cgroup.kill(self.cgroup)
        self.typed.refuse_held()
        return {"re": "moved"}

    def is_idle(self, seconds: object) -> bool:
        """Nobody is attached, and for `seconds` nothing has happened. None: that does not matter."""
        if seconds is None:
            return True
        self.idle.look()
        return not self.clients.attached() and self.idle_for() >= float(str(seconds))

    def idle_for(self) -> float:
        return min(self.idle.seconds(), time.monotonic() - self.clients.left)

    def status(self) -> Message:
        self.idle.look()
        return {
            "record": self.record,
            "frozen": cgroup.is_frozen(self.cgroup),
            "busy": "checkpointing" if self.stands_still else "restoring" if self.pager else "",
            "handing": self.handing,
            "first_output": self.first_output,
            "fenced": self.deadman.fenced,
            "fresh_until": self.deadman.until,
            "clients": self.clients.attached(),
            "start": self.ring.start,
            "end": self.ring.end,
            "idle": self.idle_for(),
            "holder": os.getpid(),
            "turn": self.writers.describe(),
            "gate": self.writers.gate.address if self.writers.gate else None,
            "journal": {"next": self.inputs.journal.next, "head": self.inputs.journal.head},
            "input": self.writers.counts(),
        }


def main() -> None:
    """argv: the package's home, the starter's socket, and the lock that says this session has a keeper:
    it stays open, and so held, until we are gone."""
    control = socket.socket(fileno=int(sys.argv[2]))
    lock = int(sys.argv[3])
    for fd in (control.fileno(), lock):
        os.set_inheritable(fd, False)
    order = protocol.parse_control(control.recv(16 << 20))
    os.umask(0o077)
    holder: Holder | None = None
    try:
        cgroup.join(str(order["holders"]))
        holder = Holder(order, control)
        if order["mode"] == "restore":
            holder.take_over(start.restore(order, control, holder.deadman.begin))
        else:
            holder.adopt(*start.start(order, control))
            start.write_token(holder.pid, holder.record["token"])
        start.tell(control, {"ok": True, "pid": holder.pid, "holder": os.getpid()})
    except Exception as error:  # noqa: BLE001 - a supervisor: whatever it was, the starter hears it and nothing stays
        start.give_up(order, control, error)
        sys.exit(1)
    if holder.pager is None:
        control.close()
    holder.loop()
    holder.finish()
    os.close(lock)  # whoever restores it here need not wait until its files are removed
    trash.remove_later(trash.of_session(holder.dir))
