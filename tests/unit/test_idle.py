"""What counts as idle, by a clock and a processor of the test's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cmdop_migrate.drain import reap
from cmdop_migrate.holder import cgroup, idle
from cmdop_migrate.host.listing import SessionRow


class World:
    def __init__(self) -> None:
        self.now, self.used = 1000.0, 0.0

    def passes(self, seconds: float, used: float = 0.0) -> None:
        self.now, self.used = self.now + seconds, self.used + used


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    one = World()
    monkeypatch.setattr(idle.time, "monotonic", lambda: one.now)  # type: ignore[attr-defined]
    monkeypatch.setattr(cgroup, "cpu_seconds", lambda _: one.used)
    return one


def test_one_percent_of_a_processor_counts_as_work(world: World) -> None:
    one = idle.Idle("group")
    world.passes(100, 0.9)
    one.look()
    assert one.seconds() == 100
    world.passes(100, 1.1)
    one.look()
    assert one.seconds() == 0
    world.passes(50)
    one.look()
    assert one.seconds() == 50


def test_looks_in_quick_succession_count_as_one(world: World) -> None:
    """`ls` every 10 ms must not make a program that wakes up once in a while look busy."""
    one = idle.Idle("group")
    for _ in range(99):
        world.passes(0.01, 0.0001)
        one.look()
    world.passes(10, 0.0)
    one.look()
    assert one.seconds() == pytest.approx(10.99)


def test_processor_time_of_a_dump_is_ignored(world: World) -> None:
    one = idle.Idle("group")
    world.passes(10)
    one.look()
    world.passes(5, 5.0)
    one.pass_over()
    world.passes(5)
    one.look()
    assert one.seconds() == 20
    one.touch()
    assert one.seconds() == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"idle_s": 9.9}, False),
        ({"idle_s": None}, False),
        ({"clients": 1}, False),
        *[
            ({"state": state}, False)
            for state in ("frozen", "fenced", "checkpointing", "parked", "restoring", "exited")
        ],
    ],
)
def test_only_a_running_session_without_clients_is_idle(change: dict[str, Any], expected: bool) -> None:
    row = replace(SessionRow("a" * 24, "w", "host-a", "running", 1, clients=0, idle_s=10.0), **change)
    assert reap.is_idle(row, 10.0) is expected


def test_processor_time_of_a_missing_group_is_zero() -> None:
    assert cgroup.cpu_seconds("/no/such/group") == 0.0
