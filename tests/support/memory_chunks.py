"""Store chunks in memory for tests of the file layer, by content, and count what is given."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import Future
from pathlib import Path


class MemoryChunks:
    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.submitted = 0
        self.new_bytes = 0
        self.reads: list[str] = []
        self._lock = threading.Lock()

    def submit(self, data: bytes | memoryview) -> Future[str]:
        data = bytes(data)
        ref = hashlib.blake2b(data, digest_size=32).hexdigest()
        with self._lock:
            self.submitted += 1
            if ref not in self.held:
                self.held[ref] = data
                self.new_bytes += len(data)
        done: Future[str] = Future()
        done.set_result(ref)
        return done

    def read(self, ref: str) -> bytes:
        with self._lock:
            self.reads.append(ref)
        return self.held[ref]


def blocks(path: Path) -> int:
    return os.lstat(path).st_blocks * 512
