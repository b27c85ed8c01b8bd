"""What a lease backend must do: hold one small value per session, and swap it atomically.

All decisions are in rules.py and store.py; a backend knows nothing of them. Every
obligation below is tested against every backend (tests/contract/test_lease.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cmdop_migrate.errors import LeaseUnreachable


@dataclass(frozen=True, slots=True)
class Cell:
    """One value as read. `version` changes with every write and never comes back. `lapsed`: the backend itself knows
    that the `live_for` this value was written with is over (False where a backend has no such knowledge)."""

    data: bytes
    version: str
    lapsed: bool = False


@dataclass(frozen=True, slots=True)
class Swap:
    """One compare-and-swap. `expected` None: only if there is no value yet.

    `live_for`: the value is a held lease of that many seconds, to be counted from the *call* at the earliest; a
    backend that tells `lapsed` must not do so before they are over, on a reference clock (margins.py). None: the value
    does not lapse."""

    session: str
    data: bytes
    expected: str | None
    live_for: float | None = None


class Register(ABC):
    """Four obligations, callable from several threads at once.

    Failures: a backend that does not answer, or not in time, raises LeaseUnreachable. After a `write` this means *not
    known*: it may have taken effect, or may yet. Nothing is tried again in here: the caller re-reads and decides. Every
    call ends within a few of the backend's time-outs.
    """

    url: str
    threads: int = 1
    """How many calls at once the backend gains from."""
    batch: int = 1
    """How many swaps `write_many` does best in one call; 1: it is only a loop."""

    @abstractmethod
    def read(self, session: str) -> Cell | None:
        """The value as of some moment between call and return: every write that ended before the call is seen
        (linearizable). None: there never was one."""

    @abstractmethod
    def write(self, swap: Swap) -> str | None:
        """The new version, and the value is durable; or None: another value was there, and stays.

        Of several writes that expect one version at most one ever takes effect, also one that arrives late."""

    @abstractmethod
    def sessions(self) -> Iterator[str]:
        """The sessions that have a value, in order. What is not a session id is passed over."""

    def write_many(self, swaps: Sequence[Swap]) -> list[str | LeaseUnreachable | None]:
        """Each on its own, not all or none. An answer for each, in order."""
        answers: list[str | LeaseUnreachable | None] = []
        for swap in swaps:
            try:
                answers.append(self.write(swap))
            except LeaseUnreachable as error:
                answers.append(error)
        return answers

    def check(self) -> None:  # noqa: B027 - most need no proof
        """Find out by trying whether the backend keeps these obligations; BadConfig says how it does not. A backend
        that can lie does this by itself before its first write."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Let go of connections. The register is not used afterwards."""
