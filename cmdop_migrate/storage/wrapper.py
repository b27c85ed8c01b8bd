"""Wrap a store: pass every method to the inner store, until a subclass overrides it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cmdop_migrate.storage.base import Data, ObjectInfo, Store


class StoreWrapper(Store):
    """Forward every method to the inner store."""

    def __init__(self, inner: Store) -> None:
        self.url = inner.url
        self._inner = inner

    def put(self, name: str, data: Data) -> None:
        self._inner.put(name, data)

    def put_new(self, name: str, data: Data) -> bool:
        return self._inner.put_new(name, data)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        return self._inner.get(name, start, length)

    def stat(self, name: str) -> ObjectInfo | None:
        return self._inner.stat(name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix)

    def few(self, prefix: str, most: int) -> Sequence[ObjectInfo] | None:
        return self._inner.few(prefix, most)

    def delete(self, names: Iterable[str]) -> None:
        self._inner.delete(names)

    def link(self, name: str, path: Path) -> bool:
        return self._inner.link(name, path)
