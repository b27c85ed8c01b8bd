"""What a checkpoint store must do, whatever is behind it.

A store maps names to immutable byte strings. Every obligation below is tested
by one contract suite against every backend (tests/contract/test_store.py).

Names are `/`-separated segments of `[a-z0-9._-]`, none beginning with a dot,
so that they are safe as paths and as keys everywhere and sort alike. A name is
never a folder of another (`a` beside `a/b`): a file system cannot hold both.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cmdop_migrate.errors import Usage

Data = bytes | bytearray | memoryview

NAME_MAX = 512
_SEGMENT = r"[a-z0-9_-][a-z0-9._-]{0,199}"
_NAME = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")
_PREFIX = re.compile(rf"(?:{_SEGMENT}/)*(?:{_SEGMENT})?")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object. `modified` is the store's own clock, seconds since the epoch."""

    name: str
    size: int
    modified: float


class Store(ABC):
    """Six obligations.

    Failures: a store that does not answer raises StoreUnreachable (trying again
    may work), one that refuses raises StoreDenied (it will not, until someone
    changes something). A missing object is a result (None, or KeyError from
    `get`), never one of those two. A name or prefix outside the rule above
    raises Usage, before anything is touched. All methods may be called from
    several threads at once.
    """

    url: str

    @abstractmethod
    def put(self, name: str, data: Data) -> None:
        """Store or replace. When it returns the object is durable and complete; killed before, the
        name holds the old object or none, never a part."""

    @abstractmethod
    def put_new(self, name: str, data: Data) -> bool:
        """Store only if the name is free. True: ours is stored. False: something was there, untouched.

        Of several at once exactly one gets True. Where an answer was lost on the way, ours is told from
        another's by its content: who races for a name must put something of its own into the data.
        StoreUnreachable means not known: it may be stored, or become so."""

    @abstractmethod
    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """The object, or the range of it. KeyError when there is none; a range past the end comes back short."""

    @abstractmethod
    def stat(self, name: str) -> ObjectInfo | None:
        """Size and age, or None."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose names start with `prefix`, in name order. Sees every object whose put returned before;
        one put or deleted meanwhile may be seen or not. What is in the place but not under a valid name is
        passed over."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove. A name that is not there is no error. Killed half-way, some are gone and the others whole."""

    def few(self, prefix: str, most: int) -> Sequence[ObjectInfo] | None:
        """As `list`, where there are no more than `most`; None where there are. It takes no longer than to find that
        out, however many there are."""
        found = [*islice(self.list(prefix), most + 1)]
        return found if len(found) <= most else None

    def link(self, name: str, path: Path) -> bool:
        """Give the object a second name on this machine's disk, instead of a copy. False: that is not possible."""
        del name, path
        return False


def is_name(text: str) -> bool:
    return len(text) <= NAME_MAX and _NAME.fullmatch(text) is not None


def check_name(name: str) -> str:
    """The name, when it is one. Backends call this first, in every method."""
    if not is_name(name):
        raise Usage(
            f"not an object name: {name!r}",
            "Use segments of a-z, 0-9, '.', '_' and '-', not beginning with '.', joined by '/'.",
        )
    return name


def check_prefix(prefix: str) -> str:
    """The prefix, when names can begin with it."""
    if len(prefix) > NAME_MAX or not _PREFIX.fullmatch(prefix):
        raise Usage(f"no object name begins with {prefix!r}", "Use a-z, 0-9, '.', '_', '-' and '/'.")
    return prefix


def check_range(start: int, length: int | None) -> None:
    if start < 0 or (length is not None and length < 0):
        raise ValueError(f"not a range: start {start}, length {length}")
