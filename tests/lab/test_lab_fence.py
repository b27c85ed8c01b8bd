"""The lease fence between hosts that fail as hosts do: cut off, asleep, dead, with real servers that die as well."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate.clock import boottime
from cmdop_migrate.host.resources import TEST_STOP
from cmdop_migrate.lease.margins import freeze_allowance
from scripts.lablib import services
from tests.support import fenced_sessions
from tests.support.host import until
from tests.support.lab_hosts import LabHost, TestLab, a_lab
from tests.support.stamping_session import Stamped, assert_superseded, told_all_the_time

TTL = 3.0


@pytest.fixture(scope="module", params=["s3", "etcd"])
def lab(request: pytest.FixtureRequest) -> Iterator[TestLab]:
    with a_lab(hosts=2, lease=request.param, ttl=f"{TTL:g}s") as made:
        yield made


def stamped(lab: TestLab, name: str) -> Stamped:
    """On host-a; its notes lie on the disk of the host it runs on."""
    places = [lab.home(host.name) / "srv" / name for host in lab.hosts]
    for place in places:
        place.mkdir()
    return Stamped(lab.host("host-a"), Path("/srv", name), name, lambda token: places[token - 1])


@contextlib.contextmanager
def checkpoint_at_its_commit(host: LabHost, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """All of it uploaded; it stands where it would publish."""
    argv = host.argv("--json", "checkpoint", name, env={TEST_STOP: "checkpoint:commit"})
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as late:
        try:
            until(host.stopped, 30, "it stands at its commit")
            yield late
        finally:
            for pid in host.stopped():
                os.kill(pid, signal.SIGKILL)


def assert_one_after_the_other(noted: Stamped, b: LabHost, *kinds: str) -> None:
    """At no instant did both run, or do what a client told them."""
    noted.restored_on(b)
    runs_from = fenced_sessions.event(b, noted.session, "restored")["boottime"]
    for kind in kinds:
        before, after = noted.times(kind, 1), [one for one in noted.times(kind, 2) if one >= runs_from]
        assert before and after and max(before) < runs_from, kind


def assert_b_keeps_it(lab: TestLab, session: str) -> None:
    a, b = lab.hosts
    assert fenced_sessions.lease(a, session)["holder"] == fenced_sessions.lease(b, session)["holder"] == "host-b"
    (row,) = [one for one in b.sessions() if one["session"] == session]
    assert row["state"] == "running"


def test_partition(lab: TestLab) -> None:
    """A is cut off, B restores when the lease is over, A comes back."""
    a, b = lab.hosts
    noted, late = stamped(lab, "w"), stamped(lab, "late")
    noted.save(a)
    first = late.save(a)
    b.fails("restore", noted.session, status=5, code="fenced")
    with checkpoint_at_its_commit(a, "late") as publishing, told_all_the_time(noted.session, a, b):
        until(lambda: len(noted.times("did", 1)) > 3, 10, "A does what it is told")
        lab.cut("host-a")
        try:
            b.ok("restore", noted.session, "--wait", "40s")
            b.ok("restore", late.session, "--wait", "40s")
            until(lambda: len(noted.times("did", 2)) > 10, 10, "B does what it is told")
            fenced = fenced_sessions.event(a, noted.session, "fenced")
            assert fenced["boottime"] < fenced_sessions.event(b, noted.session, "restored")["boottime"]
            assert not [one for one in a.events(noted.session) if one["event"] == "superseded"]
            assert a.cm("checkpoint", "w").returncode == 6
        finally:
            lab.heal("host-a")
        for pid in a.stopped():
            os.kill(pid, signal.SIGCONT)
        out, _ = publishing.communicate(timeout=40)
        assert publishing.returncode == 5, out
    for one, kinds in ((noted, ("ran", "did")), (late, ("ran",))):
        assert_superseded(a, one.session)
        assert_one_after_the_other(one, b, *kinds)
        assert_b_keeps_it(lab, one.session)
    assert fenced_sessions.lease(b, late.session)["checkpoint"] == first, "the late one is not published"
    for session in (noted.session, late.session):
        b.ok("kill", session)


def test_asleep_past_its_lease(lab: TestLab, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything of A stops at once, B takes over, everything of A wakes at once."""
    a, b = lab.hosts
    noted = stamped(lab, "naps")
    noted.save(a)
    lab.pause("host-a")
    try:
        b.ok("restore", noted.session, "--wait", "40s")
        until(lambda: noted.times("ran", 2), 10, "B runs")
        woken = boottime()
    finally:
        lab.resume("host-a")
    assert_superseded(a, noted.session)
    ran = [one - woken for one in noted.times("ran", 1) if one >= woken]
    with capsys.disabled():
        window = f"{max(ran) * 1000:.2f} ms" if ran else "not at all"
        print(
            f"\n  a host that slept past its lease ({lab.spec.lease}): the session ran {window} before it was stopped"
        )
    assert not ran or max(ran) < 1.0
    assert_b_keeps_it(lab, noted.session)
    b.ok("kill", noted.session)


def test_dead_and_booted_again(lab: TestLab) -> None:
    """B restores the session from the last checkpoint; A does not run it after its next boot."""
    a, b = lab.hosts
    noted = stamped(lab, "dies")
    noted.save(a)
    lab.kill("host-a")
    b.ok("restore", noted.session, "--wait", "40s")
    until(lambda: noted.times("ran", 2), 10, "B runs")
    lab.start("host-a")
    assert not [one for one in a.sessions() if one["session"] == noted.session and one["state"] == "running"]
    a.fails("restore", noted.session, status=5, code="fenced")
    assert_one_after_the_other(noted, b, "ran")
    assert_b_keeps_it(lab, noted.session)
    b.ok("kill", noted.session)


def leader_first(lab: TestLab) -> list[str]:
    with lab.network():
        led = {
            node.name: services.member(lab.directory, lab.spec, node).is_leader() for node in lab.spec.of_kind("etcd")
        }
    assert sum(led.values()) == 1, led
    return sorted(led, key=lambda name: not led[name])


def test_members_of_etcd_die(capsys: pytest.CaptureFixture[str]) -> None:
    """If one of three dies, the leader, no session is frozen. If two die, all sessions are frozen in time, and resume
    when the members are back."""
    ttl = 6.0  # a new leader takes 1 to 2.5 s, and a dead member's silence 0.8 s: two thirds of fresh_for must be more
    with a_lab(hosts=1, lease="etcd3", ttl=f"{ttl:g}s") as lab:
        (host,) = lab.hosts
        sessions = [fenced_sessions.counter(host, name) for name in ("one", "two")]
        first, second, _ = leader_first(lab)
        lab.kill(first)
        time.sleep(1.5 * ttl)
        for session in sessions:
            fenced_sessions.counts_on(host, session)
            assert not [one for one in host.events(session) if one["event"] == "fenced"]
        lab.kill(second)
        late = [fenced_sessions.wait_event(host, session, "fenced", 3 * ttl)["late_ms"] for session in sessions]
        with capsys.disabled():
            print(f"\n  two of three etcd members dead: frozen {max(late):.2f} ms after the deadline")
        assert all(0 <= one < freeze_allowance(ttl) * 1000 for one in late)
        for session in sessions:
            fenced_sessions.stands_still(host, session)
        lab.start(second)
        for session in sessions:
            fenced_sessions.wait_event(host, session, "unfenced", 20)
            fenced_sessions.counts_on(host, session)
        lab.start(first)
