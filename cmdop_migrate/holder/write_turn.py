"""The write turn of a session: who alone may type, who waits for it, and until when.

Pure: no clock, no terminal; times are given, in seconds on a clock that only
grows. Nobody has it: everybody may write. Stdlib only: the holder loads this.
"""

from __future__ import annotations

QUEUE_LIMIT = 16
NAME_LIMIT = 128
LONGEST = 7 * 86400.0
Saved = dict[str, object]


class Refused(Exception):
    """What was asked is not this actor's to ask, or makes no sense now. `code` is for programs."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


class Turn:
    """At most one holder; those who wait are in order, each once, at most QUEUE_LIMIT; nobody waits for a free turn.

    `frozen`: who has it seized it and wants the session to stand still. That ends with the turn, whichever way.
    """

    def __init__(self) -> None:
        self.holder: str | None = None
        self.frozen = False
        self._timeout = self._until = 0.0
        self._queue: list[tuple[str, float]] = []

    @property
    def queue(self) -> list[str]:
        return [actor for actor, _ in self._queue]

    def may_write(self, actor: str) -> bool:
        return self.holder is None or self.holder == actor

    def touch(self, actor: str, now: float) -> None:
        """Input of its holder: the time counts anew."""
        if actor == self.holder:
            self._until = now + self._timeout

    def deadline(self) -> float | None:
        """When it lapses, if nothing is typed. None: never; nobody has it, or the session stands still for it."""
        return None if self.holder is None or self.frozen else self._until

    def left(self, now: float) -> float | None:
        until = self.deadline()
        return None if until is None else max(0.0, until - now)

    def request(self, actor: str, timeout: float, now: float) -> bool:
        """Whether it is theirs now; else they wait for it."""
        _check(actor, timeout)
        if self.holder == actor:
            self._timeout = timeout
            self.touch(actor, now)
        elif self.holder is None:
            self._give(actor, timeout, now)
        elif actor in self.queue:
            self._queue = [(one, timeout if one == actor else time) for one, time in self._queue]
        elif len(self._queue) >= QUEUE_LIMIT:
            raise Refused("full", f"{QUEUE_LIMIT} others wait for it already")
        else:
            self._queue.append((actor, timeout))
        return self.holder == actor

    def withdraw(self, actor: str) -> None:
        """They wait no longer."""
        self._queue = [one for one in self._queue if one[0] != actor]

    def grant(self, by: str, to: str | None, admin: bool, timeout: float, now: float) -> None:
        """Gives it to `to`, or to who waits longest."""
        if by != self.holder and not admin:
            raise Refused("not_yours", f"{self.holder or 'nobody'} has it, and only they or an admin may grant it")
        if to is None:
            if not self._queue:
                raise Refused("nobody", "nobody waits for it")
            self._next(now)
            return
        _check(to, timeout)
        self._give(to, timeout, now)

    def release(self, by: str, now: float) -> None:
        """Their own turn, or their place in the queue, is over."""
        if by in self.queue:
            self.withdraw(by)
        elif by != self.holder:
            raise Refused("not_yours", f"{self.holder or 'nobody'} has it, not {by}")
        else:
            self._next(now)

    def seize(self, by: str, admin: bool, timeout: float, freeze: bool, now: float) -> None:
        """An admin's, at once, whoever has it. Those who wait keep their places; who had it does not get one."""
        _check(by, timeout)
        if not admin:
            raise Refused("not_admin", "only an admin may seize it")
        self._give(by, timeout, now)
        self.frozen = freeze

    def lapse(self, now: float) -> bool:
        """Whether its time was over; the next one has it then, or nobody."""
        until = self.deadline()
        if until is None or now < until:
            return False
        self._next(now)
        return True

    def save(self, now: float) -> Saved:
        """For the incarnation after this one. The time that passes in between does not count."""
        return {
            "holder": self.holder,
            "frozen": self.frozen,
            "timeout": self._timeout,
            "left": max(0.0, self._until - now) if self.holder else 0.0,
            "queue": [list(one) for one in self._queue],
        }

    def load(self, saved: Saved, now: float) -> None:
        """KeyError, TypeError or ValueError on what no turn is."""
        holder, queue = saved["holder"], saved["queue"]
        if not isinstance(queue, list) or len(queue) > QUEUE_LIMIT:
            raise ValueError("not a queue")
        waiting = [(str(actor), float(timeout)) for actor, timeout in queue]
        if holder is None:
            self.holder, self.frozen, self._queue = None, False, []  # nobody waits for a free turn
            return
        if not isinstance(holder, str):
            raise TypeError("not a name")
        left, timeout = float(str(saved["left"])), float(str(saved["timeout"]))
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
        raise Refused("timeout", "a turn lasts more than nothing and at most a week without input")
