"""Keep leases in this process's memory: for tests, and as the simplest implementation of the contract."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from cmdop_migrate.lease.record import check_session
from cmdop_migrate.lease.register import Cell, Register, Swap


class MemoryRegister(Register):
    """Hold one record per session in a dict."""

    def __init__(self) -> None:
        self.url = "memory://"
        self._cells: dict[str, tuple[bytes, int]] = {}
        self._lock = threading.Lock()

    def read(self, session: str) -> Cell | None:
        check_session(session)
        with self._lock:
            stored = self._cells.get(session)
        return None if stored is None else Cell(stored[0], str(stored[1]))

    def write(self, swap: Swap) -> str | None:
        check_session(swap.session)
        with self._lock:
            stored = self._cells.get(swap.session)
            if (None if stored is None else str(stored[1])) != swap.expected:
                return None
            version = 1 if stored is None else stored[1] + 1
            self._cells[swap.session] = swap.data, version
            return str(version)

    def sessions(self) -> Iterator[str]:
        with self._lock:
            return iter(sorted(self._cells))
