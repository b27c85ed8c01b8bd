"""Measure what a store with many checkpoints costs the next command, with single requests and as we do it.

A store in memory whose every request takes as long as one to another continent's S3 does (--ms): only the waiting
is real. Both ways in one run, on the same store.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.keys import KeyRing, new_key
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.store import catalog, index
from cmdop_migrate.images.write.writer import ImageWriter, WriterOptions
from cmdop_migrate.storage.memory import MemoryStore
from scripts.benchlib.common import table
from tests.unit.images.image_helpers import Wrapped

PAGE = 1000  # objects in an answer to who lists
NEVER = 1e9


class Far(Wrapped):
    """Each request takes a while; a listing, one for every thousand objects."""

    seconds = 0.0

    def before(self, operation: str, name: str) -> None:
        pages = 1 + sum(1 for _ in self.inner.list(name)) // PAGE if operation == "list" else 1
        time.sleep(self.seconds * pages)


@contextmanager
def _one_by_one() -> Iterator[None]:
    with (
        mock.patch.object(index, "READERS", 1),
        mock.patch.object(index, "LISTED", 1 << 40),
        mock.patch.object(catalog, "READERS", 1),
    ):
        yield


def _begin(store: Far, ring: KeyRing, spill: Path, ledgers: Path | None = None) -> None:
    options = WriterOptions(index_timeout=NEVER, index_caches=ledgers)
    writer = ImageWriter(store, ring, layout.new_id(), spill, options=options)
    writer.begin()
    writer.abort()


def measure(checkpoints: int, seconds: float) -> list[dict[str, Any]]:
    store, ring = Far(MemoryStore()), KeyRing((new_key(),))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        spill = Path(folder)
        for number in range(checkpoints):
            writer = ImageWriter(store, ring, layout.new_id(), spill, options=WriterOptions(index_timeout=0))
            writer.begin()
            writer.add_blob("x", os.urandom(3000))
            writer.commit(1, {"name": f"session-{number}"})
        store.seconds = seconds

        def read_all() -> None:
            read = [one for _, one in catalog.read_all(store, ring, catalog.listed(store))]
            assert len(read) == checkpoints and all(isinstance(one, Manifest) for one in read)

        def by_name() -> None:
            assert len(catalog.named(store, ring, catalog.listed(store), "session-0")) == 1

        acts: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "before a host's first checkpoint freezes its session": (
                lambda: _begin(store, ring, spill),
                lambda: _begin(store, ring, spill, spill / "ledgers"),
            ),
            "before its next one does": (
                lambda: _begin(store, ring, spill),
                lambda: _begin(store, ring, spill, spill / "ledgers"),
            ),
            "checkpoints ls": (read_all, read_all),
            "finding NAME, where no record tells its id": (by_name, by_name),
        }
        rows = []
        for name, (before, now) in acts.items():
            with _one_by_one():
                slow = _timed(before)
            quick = _timed(now)
            rows.append({"what": name, "one_by_one_s": slow, "ours_s": quick, "ratio": quick / slow})
        return rows


def _timed(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench crowd", description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=500, help="in the store [%(default)s]")
    parser.add_argument("--ms", type=float, default=30.0, help="milliseconds a request [%(default)s]")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    rows = measure(asked.checkpoints, asked.ms / 1000)
    if asked.json:
        print(json.dumps({"checkpoints": asked.checkpoints, "ms": asked.ms, "rows": rows}))
    else:
        title = f"{asked.checkpoints} checkpoints in the store, {asked.ms:g} ms a request"
        cells = [
            [str(one["what"]), f"{one['one_by_one_s']:.2f}", f"{one['ours_s']:.2f}", f"{one['ratio']:.2f}"]
            for one in rows
        ]
        print(table(title, ["what", "one by one, s", "ours, s", "ratio"], cells))
    return 0
