"""Kill the command, its fork, its unit, the agent, CRIU or CRIU's guard at random moments of a dump: no session ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cmdop_migrate.session import cgroup
from tests.crash import random_kills
from tests.crash.random_kills import Campaign, criu_of
from tests.crash.witness import show
from tests.hosts import Host, a_host, until

BLOB = "CRIUMFD"  # the mapping of CRIU's code


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[Host]:
    with a_host(tmp_path, ready=True) as host:
        yield host


def assert_none_ended(host: Host, kills: int, seconds: float, say: Callable[[str], None]) -> None:
    done = random_kills.run(host, 1, kills, seconds)
    show(f"a dump takes {done.duration:.3f} s", done.rows(), say)
    assert not any(tally.ended for tally in done.tallies.values())
    assert sum(tally.kills for tally in done.tallies.values()) > kills / 3, "most came too late"


def test_random_kills_end_no_session(ready: Host, say: Callable[[str], None]) -> None:
    assert_none_ended(ready, 36, 90, say)


@pytest.mark.heavy
def test_a_thousand_random_kills_end_no_session(ready: Host, say: Callable[[str], None]) -> None:
    assert_none_ended(ready, 1000, 3000, say)


def state_of(pid: int) -> list[tuple[str, ...]]:
    """Return what CRIU changes while it is in a process: mappings that cannot be read or are its own, descriptors,
    umask, and each thread's blocked signals."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found: list[tuple[str, ...]] = [("maps", *(line for line in maps if " r" not in line or BLOB in line))]
    found.append(("fds", *sorted(os.listdir(f"/proc/{pid}/fd"))))
    for thread in sorted(os.listdir(f"/proc/{pid}/task")):
        lines = Path(f"/proc/{pid}/task/{thread}/status").read_text().splitlines()
        found.append((thread, *(line for line in lines if line.startswith(("SigBlk", "SigPnd", "Umask", "TracerPid")))))
    return found


@pytest.mark.parametrize("victim", ["criu", "guard"])
def test_killed_criu_or_guard_leaves_nothing_in_the_session(ready: Host, victim: str) -> None:
    campaign = Campaign(ready, 1)
    group, pids = ready.group(campaign.session.session), ready.pids(campaign.session.session)
    before = {pid: state_of(pid) for pid in pids}
    with campaign.dump() as command:
        until(lambda: cgroup.is_traced(group), 20, "CRIU has all threads")
        killed = criu_of(campaign.log) if victim == "criu" else campaign.find("guard", command)
        for one in killed:
            one.kill()
        assert killed
        assert (command.wait(60) == 0) is (victim == "guard")
    assert campaign.outcome() is None
    assert {pid: state_of(pid) for pid in pids} == before
    campaign.check()
    campaign.close()


def test_criu_and_its_guard_are_outside_of_the_command_s_cgroup(ready: Host) -> None:
    campaign = Campaign(ready, 1)
    with campaign.dump() as command:
        outside = [*criu_of(campaign.log), *campaign.find("guard", command)]
        groups = [Path(f"/proc/{one.pid}/cgroup").read_text().strip() for one in outside if psutil.pid_exists(one.pid)]
        assert command.wait(60) == 0
    assert groups and all(group.endswith("/holders") for group in groups), groups
    campaign.close()
