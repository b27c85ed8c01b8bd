"""Decide what becomes of everything that clients type: applied, withheld while the session is captured, or refused.

Three rules are enforced here, in this order. Input that is numbered
(`input_streams`) may arrive twice and is applied once; while the session is
captured it is not acknowledged, because the client must send it again if the
session resumes on another host. Only the holder of the write turn may write
(`write_turn`). The gate, if there is one, is asked before a line is committed
(`gate`).
"""

from __future__ import annotations

import time

from cmdop_migrate.holder import cgroup, protocol
from cmdop_migrate.holder.clients import Client
from cmdop_migrate.holder.input_queue import Piece
from cmdop_migrate.holder.input_streams import Streams
from cmdop_migrate.holder.write_turn import Refused, Turn

TYPE_CHECKING = False
if TYPE_CHECKING:
    import select
    from typing import Protocol

    from cmdop_migrate.holder.clients import Clients
    from cmdop_migrate.holder.gate import Gate
    from cmdop_migrate.holder.idle import Idle
    from cmdop_migrate.holder.input_queue import Inputs
    from cmdop_migrate.holder.lease_watchdog import LeaseWatchdog
    from cmdop_migrate.holder.output_ring import Ring
    from cmdop_migrate.holder.state import State
    from cmdop_migrate.holder.terminal import Terminal

    class Session(Protocol):
        """List what input admission uses of the holder."""

        record: Message
        cgroup: str
        epoll: select.epoll
        clients: Clients
        inputs: Inputs
        ring: Ring
        idle: Idle
        watchdog: LeaseWatchdog
        terminal: Terminal
        state: State

        def feed_terminal(self) -> None: ...

        def note(self, event: str, **facts: object) -> None: ...


# Seconds: a client that keeps typing without the turn gets one refusal; after a pause another, with the total.
REFUSAL_BURST = 1.0
NOTES = 100  # events that one session may add to the host's log in a minute
BEHIND = 64 << 10  # bytes not read yet: such a client has no use for the turns in between
UNDECIDED = 0  # the journal number of an input that the gate has not let in yet; real ones begin at 1
Message = dict[str, object]


class InputAdmission:
    """Enforce the write turn and the gate of one session, and apply numbered input once."""

    def __init__(self, session: Session, gate_order: Message | None) -> None:
        self._session = session
        self.streams = Streams()
        self.turn = Turn()
        self.gate: Gate | None = None
        self.refused = self.dropped = 0  # bytes, of this incarnation
        self._withheld: list[tuple[Client, bytes, int | None]] = []  # with the number in its stream, if it has one
        self._noted_from, self._noted, self._unsaid = 0.0, 0, 0
        self._waiters: dict[str, Client] = {}  # actors that wait for the turn on an open connection
        if gate_order is not None:
            from cmdop_migrate.holder.gate import Gate  # few holders need it

            self.gate = Gate(gate_order, session.cgroup, session.epoll, self._on_decision)
            session.inputs.ask = self._ask

    # What arrives

    def receive(self, client: Client, data: bytes) -> None:
        """Apply input without numbers, withhold it, or refuse it and tell the client."""
        session = self._session
        if client.read_only:
            return
        session.idle.touch()
        if session.state.is_over:
            session.clients.say(client, {"event": "refused", "bytes": len(data)})
        elif session.state.withholds_input:
            self._withhold(client, data, None)
        else:
            self._apply(client, data)

    def receive_numbered(self, client: Client, at: int, data: bytes) -> Message:
        """Apply the bytes from number `at` of the client's stream that are new. Return how much of the stream has
        arrived. Input refused for want of the turn has arrived too: the client was told, and must not send it again."""
        session = self._session
        if client.read_only or client.stream is None or at < 0:
            return {"event": "refused", "bytes": len(data), "why": "read-only" if client.read_only else "no stream"}
        session.idle.touch()
        applied = self.streams.open(client.stream)
        if session.state.withholds_input:
            self._withhold(client, data, at)
            return {"event": "applied", "at": applied}
        new = self.streams.new(client.stream, at, data)
        if new is None:
            return {"event": "refused", "bytes": len(data), "why": "gap", "at": applied}
        if new:
            self._apply(client, new)
        return {"event": "applied", "at": self.streams.apply(client.stream, len(new))}

    def send(self, client: Client, request: protocol.Send) -> Message | None:
        """Apply one whole input and return the answer. Return None if the gate is asked: the answer follows later."""
        session, data, stream = self._session, request.data, request.stream
        if session.state.withholds_input:
            return {"re": "send", "error": "checkpointing"}
        if not session.inputs.has_room(len(data)):
            return {"re": "send", "error": "full"}
        if stream is not None and self.streams.open(stream):
            seq, at = self.streams.last(stream)  # it was applied: only the answer was lost
            if seq == UNDECIDED:
                return {"re": "send", "error": "gate", "why": "the gate was asked; its answer was lost"}
            return {"re": "send", "seq": seq, "at": at}
        session.idle.touch()
        at = session.ring.end
        answer = self._send(client, request.actor, data)
        if stream is not None and (answer is None or "error" not in answer):
            number = UNDECIDED if answer is None else answer["seq"]
            assert isinstance(number, int)
            self.streams.apply(stream, len(data), number, at)
        session.feed_terminal()
        return answer

    def deliver_withheld(self) -> None:
        """Apply the input that arrived while the session was captured: it resumes here."""
        withheld, self._withheld = self._withheld, []
        for client, data, at in withheld:
            if at is None:
                self._put(client, data)
            else:
                self._session.clients.say(client, self.receive_numbered(client, at, data))

    def refuse_withheld(self) -> None:
        """Tell clients that their withheld input is lost: this copy ends. Numbered input is not refused, because it was
        not acknowledged and is sent again."""
        for client in {client for client, _, at in self._withheld if at is None}:
            count = sum(len(data) for sender, data, _ in self._withheld if sender is client)
            self._session.clients.say(client, {"event": "refused", "bytes": count})

    def _withhold(self, client: Client, data: bytes, at: int | None) -> None:
        self._withheld.append((client, data, at))
        if sum(len(data) for _, data, _ in self._withheld) > protocol.MAX_PAYLOAD // 4:
            self._session.clients.block(client)

    def _apply(self, client: Client, data: bytes) -> None:
        session = self._session
        self._put(client, data)
        session.feed_terminal()
        if not session.inputs.has_room(protocol.MAX_PAYLOAD // 16):
            session.clients.block(client)

    def _put(self, client: Client, data: bytes) -> None:
        """Queue a client's input behind all earlier input; or refuse it, and tell the client."""
        if not self._admit(client.actor):
            self._refuse(client, len(data), "turn", f"{self.turn.holder} has the write turn")
            return

        def settle(piece: Piece, error: str, why: str) -> None:
            if error in ("turn", "gate"):
                self._refuse(client, len(piece.data), error, why)

        self._session.inputs.add(client.actor, data, self._session.terminal.master, settle)

    def _send(self, client: Client, actor: str, data: bytes) -> Message | None:
        session, at = self._session, self._session.ring.end
        if not self._admit(actor):
            self.refused += len(data)
            return {"re": "send", "error": "turn", "holder": self.turn.holder}
        if self.gate is None:
            return {"re": "send", "seq": session.inputs.add(actor, data, session.terminal.master), "at": at}
        answers: list[Message] = []
        late = False

        def settle(piece: Piece, error: str, why: str) -> None:
            answer: Message = {"re": "send", "seq": piece.seq or session.inputs.journal.next, "at": at}
            if error:
                self.refused += len(piece.data)
                answer = {"re": "send", "error": error, "why": why, "holder": self.turn.holder}
            if late:
                session.clients.say(client, answer)
            answers.append(answer)

        session.inputs.add(actor, data, session.terminal.master, settle)
        late = True
        return answers[0] if answers else None

    def _admit(self, actor: str) -> bool:
        self.turn.touch(actor, time.monotonic())
        return self.turn.may_write(actor)

    def _refuse(self, client: Client, count: int, error: str, why: str) -> None:
        now = time.monotonic()
        self.refused += count
        client.refused += count
        burst, client.refused_at = now - client.refused_at < REFUSAL_BURST, now
        if burst and error == "turn":
            return
        event: Message = {"event": "refused", "bytes": client.refused, "why": error, "reason": why}
        client.refused = 0
        self._session.clients.say(client, event | {"holder": self.turn.holder})

    # The turn

    def change_turn(self, client: Client, request: protocol.TurnRequest) -> Message | None:
        """Carry out a request about the write turn and return the answer. Return None if the client waits for the turn:
        it is answered when it has it."""
        if self._session.state.withholds_input:
            return {"re": "turn", "error": "checkpointing"}
        do, actor = request.do, request.actor
        before, now, dropped = self.turn.holder, time.monotonic(), 0
        was_frozen = self.turn.frozen
        try:
            if do == "request":
                if not self.turn.request(actor, request.timeout, now) and request.waits:
                    self._waiters[actor] = client
                    return None
            elif do == "grant":
                self.turn.grant(actor, request.to, request.is_admin, request.timeout, now)
            elif do == "release":
                self.turn.release(actor, now)
            elif do == "seize":
                self.turn.seize(actor, request.is_admin, request.timeout, request.freeze, now)
                why = f"{actor} seized the write turn"
                dropped = self._session.inputs.drop(lambda piece: piece.actor not in (None, actor), "turn", why)
            elif do != "show":
                raise ValueError(f"unknown turn {do!r}")
        except Refused as error:
            return {"re": "turn", "error": error.code, "why": str(error), **self.describe()}
        if (before, was_frozen) != (self.turn.holder, self.turn.frozen) or do == "seize":
            self._changed(do, actor, before, was_frozen, dropped)
        return {"re": "turn", "dropped": dropped, **self.describe()}

    def _changed(self, do: str, actor: str, before: str | None, was_frozen: bool, dropped: int = 0) -> None:
        """Enforce, journal and announce that the turn went from `before` to its present holder."""
        session, turn = self._session, self.turn
        if turn.frozen:
            cgroup.order_freeze(session.cgroup)
        elif was_frozen and not session.state.withholds_input and session.watchdog.may_run():
            session.idle.touch()
            cgroup.thaw(session.cgroup)
        self.dropped += dropped
        facts: Message = {"actor": actor, "holder": turn.holder, "before": before, "frozen": turn.frozen}
        facts["dropped"] = dropped
        line = {"time": round(time.time(), 3), "turn": do, **facts, "token": session.inputs.token}
        session.inputs.journal.write(line)
        self.note("turn", do=do, **facts)
        session.clients.tell_all({"event": "turn", "do": do, **facts}, BEHIND)
        session.feed_terminal()  # the input that waited behind what was dropped
        self._answer_waiter()

    def _answer_waiter(self) -> None:
        """Answer the client that waited for the turn it has now. If its connection is closed, release the turn."""
        holder = self.turn.holder
        client = self._waiters.pop(holder, None) if holder is not None else None
        if client is None or holder is None:
            return
        if self._session.clients.get(client.fd) is client:
            self._session.clients.say(client, {"re": "turn", "dropped": 0, **self.describe()})
        else:
            self.turn.release(holder, time.monotonic())
            self._changed("left", holder, holder, False)

    def forget_gone(self) -> None:
        """Remove actors from the queue for the turn whose connections have closed."""
        clients = self._session.clients
        gone = [actor for actor, client in self._waiters.items() if clients.get(client.fd) is not client]
        for actor in gone:
            del self._waiters[actor]
            self.turn.withdraw(actor)

    def counts(self) -> dict[str, int]:
        """Return bytes: those that wait for the terminal or the gate, and those this incarnation did not apply."""
        return {"waiting": self._session.inputs.count, "refused": self.refused, "dropped": self.dropped}

    def describe(self) -> Message:
        """Return the turn as clients see it."""
        left = self.turn.left(time.monotonic())
        return {
            "holder": self.turn.holder,
            "queue": self.turn.queue,
            "frozen": self.turn.frozen,
            "left_s": None if left is None else round(left, 1),
            "staged": self._staged(),
        }

    def _staged(self) -> Message | None:
        """Return what is typed but not committed. The next holder of the turn takes it over; its authors stay named."""
        staged = self._session.inputs.staged()
        return {"bytes": len(str(staged["data"])), "authors": staged["authors"]} if staged["data"] else None

    # The gate

    def _ask(self, facts: Message) -> None:
        assert self.gate is not None
        record = self._session.record
        self.gate.ask({"session": record["session"], "name": record["name"], "host": record["host"], **facts})

    def _on_decision(self, allowed: bool, why: str, failed: bool) -> None:
        session, piece = self._session, self._session.inputs.asked
        if piece is None:
            return
        authors = session.inputs.staged()["authors"]
        if not allowed or why:
            event = "gate_failed" if failed else "gate_refused"
            self.note(event, allowed=allowed, actor=piece.actor, originators=authors, why=why)
        session.inputs.decide(allowed, why, session.terminal.master)
        session.feed_terminal()

    def note(self, event: str, **facts: object) -> None:
        """Add an event to the host's log, up to a limit per minute: all sessions share it, and one must not push the
        others' events out. The input journal has all of them."""
        now = time.monotonic()
        if now - self._noted_from > 60:
            self._noted_from, self._noted = now, 0
        self._noted += 1
        if self._noted <= NOTES:
            self._session.note(event, **facts, **({"unsaid": self._unsaid} if self._unsaid else {}))
            self._unsaid = 0
        else:
            self._unsaid += 1

    # Time, and the incarnation after this one

    def deadline(self) -> float | None:
        """Return when `on_time` has something to do, on CLOCK_MONOTONIC."""
        if self._session.state.withholds_input:
            return None  # no time passes for a captured session
        times = [self.turn.deadline(), self.gate.deadline if self.gate else None]
        return min((moment for moment in times if moment is not None), default=None)

    def on_time(self) -> None:
        """End a turn whose time is over, and a gate that takes too long."""
        if self._session.state.withholds_input:
            return
        now, before = time.monotonic(), self.turn.holder
        if self.turn.lapse(now):
            self._changed("lapse", str(before), before, False)
        if self.gate is not None:
            self.gate.check(now)

    def stop(self) -> None:
        """Cancel the gate's question, because the session is captured: it is asked again after that."""
        if self.gate is not None:
            self.gate.cancel()
        self._session.inputs.cancel()

    def save(self) -> Message:
        """Return the turn, the waiting input and the journal's head, for the checkpoint."""
        inputs = self._session.inputs
        return {
            "turn": self.turn.save(time.monotonic()),
            "queued": inputs.queued(),
            "journal": {"next": inputs.journal.next, "head": inputs.journal.head},
        }

    def load(self, saved: Message) -> None:
        """Take over what `save` returned. Raise KeyError, TypeError or ValueError on anything else."""
        turn, queued, journal = saved["turn"], saved["queued"], saved["journal"]
        inputs = self._session.inputs
        if isinstance(journal, dict) and int(journal["next"]) >= inputs.journal.next:
            inputs.journal.next, inputs.journal.head = int(journal["next"]), str(journal["head"])
        if isinstance(turn, dict):
            self.turn.load(turn, time.monotonic())
        if self.turn.frozen:
            cgroup.order_freeze(self._session.cgroup)
        assert isinstance(queued, list)
        for actor, data, secret in queued:
            inputs.queue(str(data).encode("latin-1"), actor, bool(secret))
