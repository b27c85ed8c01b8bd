"""drain, undrain: over real sshds, with sessions that count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fences
from tests.drains import World, several


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with several(tmp_path, "host-a", "host-b", "host-c") as made:
        yield made


def test_there_and_back(world: World) -> None:
    a, b, c = (world[name] for name in ("host-a", "host-b", "host-c"))
    sessions = {name: fences.counter(a, name) for name in ("w1", "w2", "w3", "w4")}
    plan = a.cm_json("drain", "--dry-run", "--to", "host-b,host-c")
    print(plan)
    facts = a.cm_json("drain", "--to", "host-b,host-c", "--deadline", "2m", timeout=120)
    print(facts)
    assert facts["failed"] == facts["left"] == facts["parked"] == []
    assert {one["to"] for one in facts["moved"]} == {"host-b", "host-c"}
    for one in facts["moved"]:
        fences.counts_on(world[one["to"]], one["session"])
        assert world.where(one["session"]) == [one["to"]]
    a.assert_clean(ended=True)
    error = a.fails("run", "-d", "--", "true", status=4, code="blocked")
    assert "undrain" in error["hint"]
    facts = a.cm_json("undrain", "--bring-back", timeout=120)
    print(facts)
    assert {one["session"] for one in facts["restored"]} == set(sessions.values())
    for session in sessions.values():
        fences.counts_on(a, session)
        assert world.where(session) == ["host-a"]
    for host in (b, c):
        host.assert_clean(ended=True)
