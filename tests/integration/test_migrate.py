"""Move a running session to another host, over a real sshd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fences
from tests.hosts import until
from tests.moves import World, two


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with two(tmp_path) as made:
        yield made


def test_it_goes_there_and_back_and_counts_on(world: World) -> None:
    a, b = world.a, world.b
    session = fences.counter(a)
    facts = a.cm_json("migrate", "w", "--to", "host-b")
    print(facts)
    assert (facts["session"], facts["from"], facts["to"], facts["token"]) == (session, "host-a", "host-b", 2)
    assert 0 < facts["frozen_s"] <= facts["downtime_s"] < facts["took_s"]
    fences.counts_on(b, session)
    assert world.where(session) == ["host-b"]
    (row,) = a.sessions()
    assert (row["state"], row["note"]) == ("exited", "moved to host-b (token 2)")
    a.assert_clean(ended=True)
    assert world.resume() == []


def test_restore_to(world: World) -> None:
    a, b = world.a, world.b
    session = fences.counter(a)
    error = a.fails("restore", "w", "--to", "host-b", status=5, code="fenced")
    assert "migrate w --to host-b" in error["hint"]
    a.ok("checkpoint", "w")
    parked = len(fences.numbers(a, session))
    facts = a.cm_json("restore", "--to", "host-b")
    assert (facts["session"], facts["host"], facts["token"]) == (session, "host-b", 2)
    assert fences.counts_on(b, session) >= parked
    assert a.sessions()[0]["note"] == "moved to host-b (token 2)"


def test_a_target_that_fails_gives_it_back(world: World) -> None:
    a = world.a
    session = fences.counter(a)
    world.b.start("sleep", "1000", name="w")  # two of one name
    error = a.fails("migrate", "w", "--to", "host-b", "--accept", "name", status=4, code="blocked")
    assert "goes on here" in error["hint"], error
    fences.counts_on(a, session)
    assert world.where(session) == ["host-a"]
    until(lambda: fences.lease(a, session)["holder"] == "host-a", 5)
    world.b.ok("kill", "w")
    a.ok("migrate", "w", "--to", "host-b")
    fences.counts_on(world.b, session)
