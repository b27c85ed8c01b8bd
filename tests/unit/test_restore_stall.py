"""A session that runs while the store is unreachable: its restore reports the stall, and does not fail because of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from cmdop_migrate.errors import StoreUnreachable
from cmdop_migrate.events import Events
from cmdop_migrate.host.host import Host as LocalHost
from cmdop_migrate.snapshot.restore import _Restore
from cmdop_migrate.snapshot.restore_options import RestoreOptions

AWAY = StoreUnreachable("no answer", "")
READERS = 6  # so many threads wait for the store simultaneously


def restoring(place: Path) -> _Restore:
    records = cast(LocalHost, SimpleNamespace(config=None, events=Events(place, "a")))
    one = _Restore(records, None, RestoreOptions(lazy=True), lambda _: None, lambda _: None)
    one.session, one.stall_note = "abc", place / "stall"
    return one


def all_at_once(act: Callable[[], None]) -> None:
    together = threading.Barrier(READERS)

    def run(_: int) -> None:
        together.wait()
        act()

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(run, range(READERS)))


def test_simultaneous_stall_reports_write_each_event_once(tmp_path: Path) -> None:
    one = restoring(tmp_path)
    for _ in range(50):
        all_at_once(lambda: one._stalled(1.0, AWAY))
        all_at_once(lambda: one._stalled(2.0, None))
    events: list[Any] = [line["event"] for line in one.this_host.events.read()]
    assert events == ["memory_stalled", "memory_going_on"] * 50


def test_stall_that_cannot_be_recorded_does_not_fail(tmp_path: Path) -> None:
    one = restoring(tmp_path / "gone")
    one._stalled(1.0, AWAY)
    one._stalled(2.0, None)
