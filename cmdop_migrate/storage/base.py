"""Define what a checkpoint store must do, independent of the backend.

A store maps names to immutable byte strings. Every obligation below is tested by one contract suite against every
backend (tests/contract/test_store.py).

Names are `/`-separated segments of `[a-z0-9._-]`, none beginning with a dot, so that they are safe as paths and as keys
everywhere and sort alike. A name is never a folder of another (`a` beside `a/b`): a file system cannot hold both.
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
    """Describe one stored object. `modified` is by the store's own clock, in seconds since the epoch."""

    name: str
    size: int
    modified: float


class Store(ABC):
    """Store objects by name. Every backend fulfils the six obligations of the abstract methods.

    Failures: a store that does not answer raises StoreUnreachable (a retry may work), one that refuses raises
    StoreDenied (a retry will not work until something is changed). A missing object is a result (None, or KeyError from
    `get`), never one of those two. A name or prefix outside the rule above raises Usage, before anything is touched.
    All methods may be called from several threads simultaneously.
    """

    url: str

    @abstractmethod
    def put(self, name: str, data: Data) -> None:
        """Store or replace an object. When this returns the object is durable and complete; after a kill before that,
        the name holds the old object or none, never a part."""

    @abstractmethod
    def put_new(self, name: str, data: Data) -> bool:
        """Store an object only if the name is free. Return True if ours is stored, False if another object was there,
        which is left untouched.

        Of several concurrent calls exactly one gets True. If an answer was lost on the way, the content tells our
        object from another's: a caller that races for a name must put something unique into the data. After
        StoreUnreachable the outcome is unknown: the object may be stored, or become stored.
        """

    @abstractmethod
    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return the object, or the range of it. Raise KeyError if it is missing; a range past the end is cut short."""

    @abstractmethod
    def stat(self, name: str) -> ObjectInfo | None:
        """Return size and age, or None if the object is missing."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Return all objects whose names start with `prefix`, in name order. Every object whose put returned before the
        call is listed; one put or deleted meanwhile may be listed or not. Objects without a valid name are skipped."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete objects. A missing name is not an error. After a kill some are gone and the others complete."""

    def few(self, prefix: str, most: int) -> Sequence[ObjectInfo] | None:
        """Return what `list` returns if there are at most `most` objects, else None. It takes no longer than finding
        that out, however many objects there are."""
        listed = [*islice(self.list(prefix), most + 1)]
        return listed if len(listed) <= most else None

    def link(self, name: str, path: Path) -> bool:
        """Hard-link the object to `path` on this machine's disk instead of copying it. Return False if that is
        impossible."""
        del name, path
        return False


def is_name(text: str) -> bool:
    return len(text) <= NAME_MAX and _NAME.fullmatch(text) is not None


def check_name(name: str) -> str:
    """Return the name if it is valid, else raise Usage. Backends call this first, in every method."""
    if not is_name(name):
        raise Usage(
            f"not an object name: {name!r}",
            "Use segments of a-z, 0-9, '.', '_' and '-', not beginning with '.', joined by '/'.",
        )
    return name


def check_prefix(prefix: str) -> str:
    """Return the prefix if valid names can begin with it, else raise Usage."""
    if len(prefix) > NAME_MAX or not _PREFIX.fullmatch(prefix):
        raise Usage(f"no object name begins with {prefix!r}", "Use a-z, 0-9, '.', '_', '-' and '/'.")
    return prefix


def check_range(start: int, length: int | None) -> None:
    if start < 0 or (length is not None and length < 0):
        raise ValueError(f"not a range: start {start}, length {length}")
