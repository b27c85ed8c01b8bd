"""What a checkpoint store must do, whatever is behind it.

A store maps names to immutable byte strings. Names are `/`-separated paths of
`[a-z0-9._-]` segments. Every obligation below is tested by one contract suite
against every backend (tests/contract/test_store.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ObjectInfo:
    """One stored object. `modified` is the store's own clock, seconds since the epoch."""

    name: str
    size: int
    modified: float


class Store(ABC):
    """Six obligations.

    Failures: a store that does not answer raises StoreUnreachable, one that
    refuses raises StoreDenied. A missing object is a result (None, or
    KeyError from `get`), never one of those two. All methods may be called
    from several threads at once.
    """

    url: str

    @abstractmethod
    def put(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Store or replace. When it returns the object is durable and complete; killed before, the
        name holds the old object or none, never a part."""

    @abstractmethod
    def put_new(self, name: str, data: bytes | bytearray | memoryview) -> bool:
        """Store only if the name is free. True: ours is stored. False: something was there, untouched."""

    @abstractmethod
    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """The object, or the range of it. KeyError when there is none; a range past the end comes back short."""

    @abstractmethod
    def stat(self, name: str) -> ObjectInfo | None:
        """Size and age, or None."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose names start with `prefix`, in name order. Sees every object whose put returned before."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove. A name that is not there is no error. Killed half-way, some are gone and the others whole."""
