"""Who may write into a session, and what becomes of what they write: the turn and the gate, enforced in the holder.

Stdlib only: the holder loads this.
"""

from __future__ import annotations

import time

from cmdop_migrate.holder import cgroup
from cmdop_migrate.holder.clients import Client
from cmdop_migrate.holder.input_queue import Piece
from cmdop_migrate.holder.write_turn import Refused, Turn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cmdop_migrate.holder.gate import Gate
    from cmdop_migrate.holder.keeper import Keeper

BURST = 1.0  # seconds: who goes on typing in vain is told once, and after a pause again, with all that was meanwhile
TURN_TIMEOUT = 300.0
NOTES = 100  # in the host's record, a minute
BEHIND = 64 << 10  # bytes not read yet: such a client has no use for who had the turn meanwhile
Message = dict[str, object]


class Writers:
    """The turn and the gate of one keeper's session."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.turn = Turn()
        self.gate: Gate | None = None
        self.refused = self.dropped = 0  # bytes, of this incarnation
        self._noted_from, self._noted, self._unsaid = 0.0, 0, 0
        self._waiters: dict[str, Client] = {}  # who waits for the turn on an open connection
        order = keeper.order.get("gate")
        if isinstance(order, dict):
            from cmdop_migrate.holder.gate import Gate  # not loaded by every holder

            self.gate = Gate(order, keeper.cgroup, keeper.epoll, self._on_decision)
            keeper.inputs.ask = self._ask

    # What is typed

    def put(self, client: Client, data: bytes) -> None:
        """One client's input, in order behind all that came before; or refused, and said."""
        if not self.admit(client.actor):
            self._refuse(client, len(data), "turn", f"{self.turn.holder} has the write turn")
            return

        def settle(piece: Piece, error: str, why: str) -> None:
            if error in ("turn", "gate"):
                self._refuse(client, len(piece.data), error, why)

        self._keeper.inputs.add(client.actor, data, self._keeper.master, settle)

    def send(self, client: Client, actor: str, data: bytes) -> Message | None:
        """One whole input. None: the gate is asked, and the answer comes when it has answered."""
        keeper, at = self._keeper, self._keeper.ring.end
        if not self.admit(actor):
            self.refused += len(data)
            return {"re": "send", "error": "turn", "holder": self.turn.holder}
        if self.gate is None:
            return {"re": "send", "seq": keeper.inputs.add(actor, data, keeper.master), "at": at}
        answers: list[Message] = []
        late = False

        def settle(piece: Piece, error: str, why: str) -> None:
            answer: Message = {"re": "send", "seq": piece.seq or keeper.inputs.journal.next, "at": at}
            if error:
                self.refused += len(piece.data)
                answer = {"re": "send", "error": error, "why": why, "holder": self.turn.holder}
            if late:
                keeper.clients.say(client, answer)
            answers.append(answer)

        keeper.inputs.add(actor, data, keeper.master, settle)
        late = True
        return answers[0] if answers else None

    def admit(self, actor: str) -> bool:
        self.turn.touch(actor, time.monotonic())
        return self.turn.may_write(actor)

    def _refuse(self, client: Client, count: int, error: str, why: str) -> None:
        now = time.monotonic()
        self.refused += count
        client.refused += count
        burst, client.refused_at = now - client.refused_at < BURST, now
        if burst and error == "turn":
            return
        said: Message = {"event": "refused", "bytes": client.refused, "why": error, "reason": why}
        client.refused = 0
        self._keeper.clients.say(client, said | {"holder": self.turn.holder})

    # The turn

    def answer(self, client: Client, message: Message) -> Message | None:
        """{"op": "turn", "do": …, "actor": …, "admin": bool}: whoever lets the client in says who it is, and whether
        it may do all. None: it waits, and is answered when the turn is its own."""
        if self._keeper.stands_still:
            return {"re": "turn", "error": "checkpointing"}
        do, actor = str(message["do"]), str(message["actor"])
        admin, timeout = message.get("admin") is True, float(str(message.get("lasts") or TURN_TIMEOUT))
        to = message.get("to")
        before, now, dropped = self.turn.holder, time.monotonic(), 0
        was_frozen = self.turn.frozen
        try:
            if do == "request":
                if not self.turn.request(actor, timeout, now) and message.get("wait"):
                    self._waiters[actor] = client
                    return None
            elif do == "grant":
                self.turn.grant(actor, None if to is None else str(to), admin, timeout, now)
            elif do == "release":
                self.turn.release(actor, now)
            elif do == "seize":
                self.turn.seize(actor, admin, timeout, bool(message.get("freeze")), now)
                why = f"{actor} seized the write turn"
                dropped = self._keeper.inputs.drop(lambda one: one.actor not in (None, actor), "turn", why)
            elif do != "show":
                raise ValueError(f"unknown turn {do!r}")
        except Refused as error:
            return {"re": "turn", "error": error.code, "why": str(error), **self.describe()}
        if (before, was_frozen) != (self.turn.holder, self.turn.frozen) or do == "seize":
            self._changed(do, actor, before, was_frozen, dropped)
        return {"re": "turn", "dropped": dropped, **self.describe()}

    def _changed(self, do: str, actor: str, before: str | None, was_frozen: bool, dropped: int = 0) -> None:
        """It went from `before` to who has it now: enforced, journalled, told."""
        keeper, turn = self._keeper, self.turn
        if turn.frozen:
            cgroup.order_freeze(keeper.cgroup)
        elif was_frozen and not keeper.stands_still and keeper.deadman.may_run():
            keeper.idle.touch()
            cgroup.thaw(keeper.cgroup)
        self.dropped += dropped
        facts: Message = {"actor": actor, "holder": turn.holder, "before": before, "frozen": turn.frozen}
        facts["dropped"] = dropped
        keeper.inputs.journal.write({"time": round(time.time(), 3), "turn": do, **facts, "token": keeper.inputs.token})
        self.note("turn", do=do, **facts)
        keeper.clients.tell_all({"event": "turn", "do": do, **facts}, BEHIND)
        keeper.feed_terminal()  # what waited behind what was dropped
        self._tell_waiter()

    def _tell_waiter(self) -> None:
        """Who waited on a connection is answered; one that has gone had only waited as long as it was there."""
        holder = self.turn.holder
        client = self._waiters.pop(holder, None) if holder is not None else None
        if client is None or holder is None:
            return
        if self._keeper.clients.get(client.fd) is client:
            self._keeper.clients.say(client, {"re": "turn", "dropped": 0, **self.describe()})
        else:
            self.turn.release(holder, time.monotonic())
            self._changed("left", holder, holder, False)

    def forget_gone(self) -> None:
        """Who waited on a connection that is closed waits no more."""
        gone = [one for one, client in self._waiters.items() if self._keeper.clients.get(client.fd) is not client]
        for actor in gone:
            del self._waiters[actor]
            self.turn.withdraw(actor)

    def counts(self) -> dict[str, int]:
        """Bytes: that wait for the terminal or the gate, and what went nowhere in this incarnation."""
        return {"waiting": self._keeper.inputs.count, "refused": self.refused, "dropped": self.dropped}

    def describe(self) -> Message:
        left = self.turn.left(time.monotonic())
        return {
            "holder": self.turn.holder,
            "queue": self.turn.queue,
            "frozen": self.turn.frozen,
            "left_s": None if left is None else round(left, 1),
            "staged": self._staged(),
        }

    def _staged(self) -> Message | None:
        """What lies in the line, not committed: who takes the turn takes it along, and its authors stay named."""
        found = self._keeper.inputs.staged()
        return {"bytes": len(str(found["data"])), "authors": found["authors"]} if found["data"] else None

    # The gate

    def _ask(self, facts: Message) -> None:
        assert self.gate is not None
        record = self._keeper.record
        self.gate.ask({"session": record["session"], "name": record["name"], "host": record["host"], **facts})

    def _on_decision(self, allowed: bool, why: str) -> None:
        keeper, piece = self._keeper, self._keeper.inputs.asked
        if piece is None:
            return
        authors = keeper.inputs.staged()["authors"]
        if not allowed or why:
            word = "gate_failed" if why.startswith("the gate failed") else "gate_refused"
            self.note(word, allowed=allowed, actor=piece.actor, originators=authors, why=why)
        keeper.inputs.decide(allowed, why, keeper.master)
        keeper.feed_terminal()

    def note(self, event: str, **facts: object) -> None:
        """To the host's record, which is everybody's: one session's actors must not push the others out of it. The
        journal has all."""
        now = time.monotonic()
        if now - self._noted_from > 60:
            self._noted_from, self._noted = now, 0
        self._noted += 1
        if self._noted <= NOTES:
            self._keeper.note(event, **facts, **({"unsaid": self._unsaid} if self._unsaid else {}))
            self._unsaid = 0
        else:
            self._unsaid += 1

    # Time, and the incarnation after this one

    def deadline(self) -> float | None:
        """When `on_time` has something to do, on CLOCK_MONOTONIC."""
        if self._keeper.stands_still:
            return None  # for as long, no time passes
        times = [self.turn.deadline(), self.gate.deadline if self.gate else None]
        return min((one for one in times if one is not None), default=None)

    def on_time(self) -> None:
        if self._keeper.stands_still:
            return
        now, before = time.monotonic(), self.turn.holder
        if self.turn.lapse(now):
            self._changed("lapse", str(before), before, False)
        if self.gate is not None:
            self.gate.check(now)

    def stop(self) -> None:
        """It stands still from now on: what the gate is asked now, it is asked again afterwards."""
        if self.gate is not None:
            self.gate.cancel()
        self._keeper.inputs.cancel()

    def save(self) -> Message:
        inputs = self._keeper.inputs
        return {
            "turn": self.turn.save(time.monotonic()),
            "queued": inputs.queued(),
            "journal": {"next": inputs.journal.next, "head": inputs.journal.head},
        }

    def load(self, saved: Message) -> None:
        turn, queued, journal = saved["turn"], saved["queued"], saved["journal"]
        inputs = self._keeper.inputs
        if isinstance(journal, dict) and int(journal["next"]) >= inputs.journal.next:
            inputs.journal.next, inputs.journal.head = int(journal["next"]), str(journal["head"])
        if isinstance(turn, dict):
            self.turn.load(turn, time.monotonic())
        if self.turn.frozen:
            cgroup.order_freeze(self._keeper.cgroup)
        assert isinstance(queued, list)
        for actor, data, secret in queued:
            inputs.queue(str(data).encode("latin-1"), actor, bool(secret))
