"""Store objects in this process's memory: for tests and dry runs, and as the simplest implementation of the
contract."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from cmdop_migrate.clock import walltime
from cmdop_migrate.storage.base import Data, ObjectInfo, Store, check_name, check_prefix, check_range


class MemoryStore(Store):
    """Store objects in a dict."""

    def __init__(self) -> None:
        self.url = "memory://"
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def put(self, name: str, data: Data) -> None:
        check_name(name)
        with self._lock:
            self._objects[name] = bytes(data), walltime()

    def put_new(self, name: str, data: Data) -> bool:
        check_name(name)
        with self._lock:
            if name in self._objects:
                return False
            self._objects[name] = bytes(data), walltime()
            return True

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        check_name(name)
        check_range(start, length)
        data = self._objects[name][0]
        return data[start:] if length is None else data[start : start + length]

    def stat(self, name: str) -> ObjectInfo | None:
        stored = self._objects.get(check_name(name))
        return ObjectInfo(name, len(stored[0]), stored[1]) if stored else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            listed = sorted((name, stored) for name, stored in self._objects.items() if name.startswith(prefix))
        return iter([ObjectInfo(name, len(data), modified) for name, (data, modified) in listed])

    def delete(self, names: Iterable[str]) -> None:
        checked = [check_name(name) for name in names]
        with self._lock:
            for name in checked:
                self._objects.pop(name, None)
