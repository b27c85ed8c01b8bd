"""Define what a lease backend must do: hold one small value per session, and swap it atomically.

All decisions are in rules.py and store.py; a backend knows nothing of them. Every obligation below is tested against
every backend (tests/contract/test_lease.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cmdop_migrate.errors import LeaseUnreachable


@dataclass(frozen=True, slots=True)
class Cell:
    """Hold one value as read. `version` changes with every write and never repeats. `lapsed`: the backend itself knows
    that the `live_for` this value was written with is over (False if the backend has no such knowledge)."""

    data: bytes
    version: str
    lapsed: bool = False


@dataclass(frozen=True, slots=True)
class Swap:
    """Describe one compare-and-swap. `expected` None: only if there is no value yet.

    `live_for`: the value is a held lease of that many seconds, counted from the *call* at the earliest; a backend that
    reports `lapsed` must not do so before they are over, on a reference clock (margins.py). None: the value does not
    lapse.
    """

    session: str
    data: bytes
    expected: str | None
    live_for: float | None = None


class Register(ABC):
    """Hold one value per session. A backend fulfils four obligations, callable from several threads simultaneously.

    Failures: a backend that does not answer, or not in time, raises LeaseUnreachable. After a `write` the outcome is
    then *unknown*: it may have taken effect, or may yet. Nothing is retried here: the caller re-reads and decides.
    Every call ends within a few of the backend's timeouts.
    """

    url: str
    threads: int = 1
    """Number of concurrent calls that the backend benefits from."""
    batch: int = 1
    """Number of swaps that `write_many` does in one request; 1: it is only a loop."""

    @abstractmethod
    def read(self, session: str) -> Cell | None:
        """Return the value as of some moment between call and return: every write that ended before the call is visible
        (linearizable). Return None if there never was one."""

    @abstractmethod
    def write(self, swap: Swap) -> str | None:
        """Return the new version if the value was swapped and is durable; None if another value was there, which stays.

        Of several writes that expect one version at most one ever takes effect, also one that arrives late.
        """

    @abstractmethod
    def sessions(self) -> Iterator[str]:
        """Return the sessions that have a value, in order. Skip keys that are not session ids."""

    def write_many(self, swaps: Sequence[Swap]) -> list[str | LeaseUnreachable | None]:
        """Write each swap independently, not atomically together. Return an answer for each, in order."""
        answers: list[str | LeaseUnreachable | None] = []
        for swap in swaps:
            try:
                answers.append(self.write(swap))
            except LeaseUnreachable as error:
                answers.append(error)
        return answers

    def check(self) -> None:  # noqa: B027 - most backends need no check
        """Find out by trying whether the backend keeps these obligations; raise BadConfig if it does not. A backend
        that can lie does this by itself before its first write."""

    def close(self) -> None:  # noqa: B027 - most backends have nothing to close
        """Close connections. The register is not used afterwards."""
