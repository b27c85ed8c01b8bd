"""A register in this process's memory: for tests, and the plainest reading of the contract."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from cmdop_migrate.lease.record import check_session
from cmdop_migrate.lease.register import Cell, Register, Swap


class MemoryRegister(Register):
    def __init__(self) -> None:
        self.url = "memory://"
        self._cells: dict[str, tuple[bytes, int]] = {}
        self._lock = threading.Lock()

    def read(self, session: str) -> Cell | None:
        check_session(session)
        with self._lock:
            found = self._cells.get(session)
        return None if found is None else Cell(found[0], str(found[1]))

    def write(self, swap: Swap) -> str | None:
        check_session(swap.session)
        with self._lock:
            found = self._cells.get(swap.session)
            if (None if found is None else str(found[1])) != swap.expected:
                return None
            version = 1 if found is None else found[1] + 1
            self._cells[swap.session] = swap.data, version
            return str(version)

    def sessions(self) -> Iterator[str]:
        with self._lock:
            return iter(sorted(self._cells))
