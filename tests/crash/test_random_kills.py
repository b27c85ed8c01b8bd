"""Kill the command, its fork, its unit, the agent, CRIU or CRIU's guard at random moments of a dump: no session ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cmdop_migrate.holder import cgroup
from tests.crash import random_kills
from tests.crash.random_kills import Campaign, criu_of
from tests.crash.witness import show
from tests.support.host import Host, a_host, read_proc, until
from tests.support.patience import Deadline

BLOB = "CRIUMFD"  # the mapping of CRIU's code


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[Host]:
    with a_host(tmp_path, ready=True) as host:
        yield host


def campaign_of(host: Host, kills: int, seconds: float) -> Campaign:
    """Kill at random; no session may end, but for CRIU killed in the one moment that nothing covers
    (docs/concepts.md): 2 of 167 when that was measured."""
    done = random_kills.run(host, 1, kills, seconds)
    show(f"a dump takes {done.duration:.3f} s", done.rows(), print)
    ended = {victim: tally.ended for victim, tally in done.tallies.items() if tally.ended and victim != "criu"}
    assert not ended, ended
    assert sum(tally.kills for tally in done.tallies.values()) > kills / 3, "most came too late"
    return done


def test_random_kills_end_no_session(ready: Host) -> None:
    done = campaign_of(ready, 36, 90)
    assert len(done.tallies["criu"].ended) <= 1


@pytest.mark.heavy
def test_a_thousand_random_kills_end_no_session(ready: Host) -> None:
    done = campaign_of(ready, 1000, 3000)
    assert len(done.tallies["criu"].ended) <= done.tallies["criu"].kills * 0.06


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


def reads_memory(log: Path, processes: int) -> None:
    """Wait until CRIU reads the memory of every process: its code is in all of them, and none is at the trap where a kill
    of CRIU ends it (docs/concepts.md)."""
    deadline = Deadline(20)
    while not log.exists() or log.read_bytes().count(b"Dumping pages (type") < processes:
        assert not deadline.is_over(), "CRIU does not read the memory"


@pytest.mark.parametrize("victim", ["criu", "guard"])
def test_killed_criu_or_guard_leaves_nothing_in_the_session(ready: Host, victim: str) -> None:
    campaign = Campaign(ready, 1)
    group, pids = ready.group(campaign.session.session), ready.pids(campaign.session.session)
    before = {pid: state_of(pid) for pid in pids}
    with campaign.dump() as command:
        if victim == "criu":
            killed = until(lambda: criu_of(campaign.log), 20, "CRIU runs")
            reads_memory(campaign.log, len(pids))
        else:
            until(lambda: cgroup.is_traced(group), 20, "CRIU has all threads")
            killed = campaign.find("guard", command)
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
        outside = until(
            lambda: [*criu_of(campaign.log), *campaign.find("guard", command)], 20, "CRIU or its guard runs"
        )
        groups = [group for one in outside if (group := read_proc(one.pid, "cgroup").decode().strip())]
        assert command.wait(60) == 0
    assert groups and all(group.endswith("/holders") for group in groups), groups
    campaign.close()


_MASKS = """
import os, signal, threading, time

def block():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTRAP, signal.SIGUSR1})
    time.sleep(10000)

if (child := os.fork()) == 0:
    time.sleep(10000)
os.kill(child, signal.SIGSTOP)
for target in (block, block, signal.pause):
    threading.Thread(target=target).start()
print("up", flush=True)
time.sleep(10000)
"""


def masks_of(host: Host, session: str) -> list[tuple[str, str]]:
    found = []
    for pid in host.pids(session):
        for thread in os.listdir(f"/proc/{pid}/task"):
            lines = Path(f"/proc/{pid}/task/{thread}/status").read_text().splitlines()
            facts = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            found.append((facts["NSpid"].split()[-1], facts["SigBlk"]))
    return sorted(found)


def test_guarded_dump_keeps_signal_masks_and_stopped_processes(ready: Host) -> None:
    session = ready.start(sys.executable, "-c", _MASKS, name="m")["session"]
    ready.wait_for("m", "up")
    until(lambda: sum(int(mask, 16) & 0x210 == 0x210 for _, mask in masks_of(ready, session)) == 2, 10, "two block")
    before = masks_of(ready, session)
    ready.cm_json("checkpoint", "m", "--leave-running")
    assert masks_of(ready, session) == before
    ready.cm_json("checkpoint", "m")
    ready.cm_json("restore", "m")
    assert masks_of(ready, session) == before
    assert [psutil.Process(pid).status() for pid in ready.pids(session)].count(psutil.STATUS_STOPPED) == 1
