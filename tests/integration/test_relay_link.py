"""The link dies, hangs, or loses its agent: clients go on, and leases are renewed all the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate.session import cgroup
from tests import fences, typists
from tests.hosts import Host, until
from tests.relayed import Linked, linked


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    with linked(tmp_path_factory.mktemp("linked")) as made:
        yield made


def link_of(host: Host) -> int | None:
    for pid in cgroup.pids(host.group("agent")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[-2:] == [b"link", b""]:
            return pid
    return None


def test_it_comes_back_and_clients_go_on(world: Linked) -> None:
    file, a = world.credential(), world.a
    session = typists.start(a, "w")
    world.routed(session, file)
    with typists.typing(world.line(file, session)) as typist:
        typist.counts_on()
        first = link_of(a)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        typist.counts_on()
        second = until(lambda: link_of(a), 5)
        assert second != first
        a.kill_agent()
        until(lambda: link_of(a) is None, 5, "it goes with its agent")
        a.ok("ls")  # whoever comes by starts an agent, and that a link
        typist.counts_on()
        typist.finish()
        assert not [one for one in typist.events if one["event"] in ("lost", "undone", "refused")]
    assert fences.lease(a, session)["token"] == 1


def test_one_that_hangs_keeps_no_lease_from_being_renewed(world: Linked) -> None:
    file, a = world.credential(), world.a
    session = fences.counter(a, "hang")
    world.routed(session, file)
    link = until(lambda: link_of(a), 5)
    assert link is not None
    os.kill(link, signal.SIGSTOP)
    try:
        before, until_ = fences.lease(a, session)["renewals"], time.monotonic() + 4.0
        while time.monotonic() < until_:  # more than a TTL
            assert not cgroup.is_frozen(a.group(session))
            time.sleep(0.1)
        assert fences.lease(a, session)["renewals"] > before
        fences.counts_on(a, session)
    finally:
        os.kill(link, signal.SIGCONT)
    assert not [one for one in a.events(session) if one["event"] == "fenced"]
    a.kill_agent(signal.SIGTERM)
    until(lambda: link_of(a) is None, 5, "it goes with its agent")
