"""Manage the write turn of a session: which actor alone may type, which ones wait for it, and until when.

Pure: no clock, no terminal; times are given, in seconds on a clock that only
grows. While the turn is free, every actor may write.
"""

from __future__ import annotations

from cmdop_migrate.holder.protocol import seconds

QUEUE_LIMIT = 16
NAME_LIMIT = 128
LONGEST = 7 * 86400.0
Saved = dict[str, object]


class Refused(Exception):
    """Report a request that this actor may not make, or that makes no sense now. `code` is for programs."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


class Turn:
    """Hold the turn: at most one holder, and up to QUEUE_LIMIT waiting actors, each once; a free turn has none.

    `frozen`: the holder seized it and wants the session frozen. That ends with the turn, however it ends.
    """

    def __init__(self) -> None:
        self.holder: str | None = None
        self.frozen = False
        self._timeout = self._until = 0.0
        self._queue: list[tuple[str, float]] = []

    @property
    def queue(self) -> list[str]:
        """Return the waiting actors, in order."""
        return [actor for actor, _ in self._queue]

    def may_write(self, actor: str) -> bool:
        """Return whether this actor may write."""
        return self.holder is None or self.holder == actor

    def touch(self, actor: str, now: float) -> None:
        """Restart the time limit if `actor`, who has just typed, holds the turn."""
        if actor == self.holder:
            self._until = now + self._timeout

    def deadline(self) -> float | None:
        """Return when the turn lapses if nothing is typed. None: never, because it is free, or the session is frozen
        for it."""
        return None if self.holder is None or self.frozen else self._until

    def left(self, now: float) -> float | None:
        """Return the seconds until the turn lapses; None: it does not."""
        until = self.deadline()
        return None if until is None else max(0.0, until - now)

    def request(self, actor: str, timeout: float, now: float) -> bool:
        """Give the turn to `actor` or add it to the queue. Return whether it has the turn."""
        _check(actor, timeout)
        if self.holder == actor:
            self._timeout = timeout
            self.touch(actor, now)
        elif self.holder is None:
            self._give(actor, timeout, now)
        elif actor in self.queue:
            self._queue = [(name, timeout if name == actor else time) for name, time in self._queue]
        elif len(self._queue) >= QUEUE_LIMIT:
            raise Refused("full", f"{QUEUE_LIMIT} others wait for it already")
        else:
            self._queue.append((actor, timeout))
        return self.holder == actor

    def withdraw(self, actor: str) -> None:
        """Remove an actor from the queue."""
        self._queue = [entry for entry in self._queue if entry[0] != actor]

    def grant(self, by: str, to: str | None, admin: bool, timeout: float, now: float) -> None:
        """Give the turn to `to`, or to the actor that waits longest. Raise Refused."""
        if by != self.holder and not admin:
            raise Refused(
                "not_yours", f"{self.holder or 'no actor'} has it, and only its holder or an admin may grant it"
            )
        if to is None:
            if not self._queue:
                raise Refused("no_waiter", "no actor waits for it")
            self._next(now)
            return
        _check(to, timeout)
        self._give(to, timeout, now)

    def release(self, by: str, now: float) -> None:
        """End the actor's own turn, or its place in the queue. Raise Refused."""
        if by in self.queue:
            self.withdraw(by)
        elif by != self.holder:
            raise Refused("not_yours", f"{self.holder or 'no actor'} has it, not {by}")
        else:
            self._next(now)

    def seize(self, by: str, admin: bool, timeout: float, freeze: bool, now: float) -> None:
        """Give the turn to an admin immediately, whichever actor has it. Waiting actors keep their places; the former
        holder gets none. Raise Refused."""
        _check(by, timeout)
        if not admin:
            raise Refused("not_admin", "only an admin may seize it")
        self._give(by, timeout, now)
        self.frozen = freeze

    def lapse(self, now: float) -> bool:
        """End the turn if its time is over, and return whether it was; the next actor has it then, if there is one."""
        until = self.deadline()
        if until is None or now < until:
            return False
        self._next(now)
        return True

    def save(self, now: float) -> Saved:
        """Return the turn for the next incarnation. The time in between does not count."""
        return {
            "holder": self.holder,
            "frozen": self.frozen,
            "timeout": self._timeout,
            "left": max(0.0, self._until - now) if self.holder else 0.0,
            "queue": [list(entry) for entry in self._queue],
        }

    def load(self, saved: Saved, now: float) -> None:
        """Take over what `save` returned. Raise KeyError, TypeError or ValueError on anything else."""
        holder, queue = saved["holder"], saved["queue"]
        if not isinstance(queue, list) or len(queue) > QUEUE_LIMIT:
            raise ValueError("not a queue")
        waiting = [(str(actor), float(timeout)) for actor, timeout in queue]
        if holder is None:
            self.holder, self.frozen, self._queue = None, False, []  # no actor waits for a free turn
            return
        if not isinstance(holder, str):
            raise TypeError("not a name")
        left, timeout = seconds(saved["left"]), seconds(saved["timeout"])
        for actor, time in [(holder, timeout), *waiting]:
            _check(actor, time)
        if len({holder, *(actor for actor, _ in waiting)}) != len(waiting) + 1 or not 0 <= left <= timeout:
            raise ValueError("not a turn")
        self.holder, self.frozen = holder, bool(saved["frozen"])
        self._timeout, self._until, self._queue = timeout, now + left, waiting

    def _give(self, actor: str, timeout: float, now: float) -> None:
        self.withdraw(actor)
        self.holder, self.frozen = actor, False
        self._timeout, self._until = timeout, now + timeout

    def _next(self, now: float) -> None:
        if self._queue:
            actor, timeout = self._queue[0]
            self._give(actor, timeout, now)
        else:
            self.holder, self.frozen = None, False


def _check(actor: str, timeout: float) -> None:
    if not 0 < len(actor) <= NAME_LIMIT or not actor.isprintable():
        raise Refused("name", f"not a name for an actor: {actor[:40]!r}")
    if not 0 < timeout <= LONGEST:
        raise Refused("timeout", "a turn lasts more than 0 seconds and at most a week without input")
