"""A session moves underneath its client: nothing is lost, nothing doubled."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from tests import typists
from tests.relayed import Linked, linked


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    with linked(tmp_path_factory.mktemp("linked")) as made:
        yield made


def test_a_typing_client_stays_through_moves(world: Linked) -> None:
    file = world.credential()
    session = typists.start(world.a, "w")
    world.routed(session, file)
    with typists.typing(world.line(file, session)) as typist:
        typist.counts_on()
        for number in range(4):
            typist.gaps.clear()
            facts = world.move("w", there=number % 2 == 0)
            typist.counts_on()
            print(f"move {number}: frozen {facts.get('frozen_s')}, the client saw nothing for {typist.gaps}")
        typist.finish()
        assert [one["to"] for one in typist.events if one["event"] == "moving"].count("host-b") == 2, typist.events
        assert not [one for one in typist.events if one["event"] in ("lost", "undone", "refused")]
    world.a.ok("kill", "w", "--signal", "KILL")
