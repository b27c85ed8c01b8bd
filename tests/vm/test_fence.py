"""The lease fence between machines that fail as machines do: without power, paused, without a cable."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.host import until
from tests.vm.machines import Machines, VmHost

pytestmark = pytest.mark.timeout(1500)
PLACE = "/srv/ran"
# Notes, into a file of the host's named after its token: how often, its kernel's time, the time of its board.
STAMP = f"""
import itertools, time
for number in itertools.count(1):
    token = open("/run/cmdop-migrate/token").read().strip()
    board = open("/sys/class/rtc/rtc0/since_epoch").read().strip()
    with open(f"{PLACE}/{{token}}", "a") as file:
        file.write(f"{{number}} {{time.clock_gettime(time.CLOCK_BOOTTIME):.3f}} {{board}}\\n")
    print("n", number, flush=True)
    time.sleep(0.05)
"""


def stamping(vms: Machines, name: str) -> str:
    """A session on host-a whose every step is on record, on the host where it took it."""
    for host in vms.hosts:
        host.shell(f"rm -rf {PLACE}; mkdir -p {PLACE}")
    options = ("--share", PLACE)
    session: str = vms.a.start("python3", "-c", STAMP, name=name, options=options)["session"]
    vms.a.wait_for(session, "n 5")
    return session


def stamps(host: VmHost, token: int) -> list[tuple[int, float, int]]:
    lines = host.shell(f"cat {PLACE}/{token} 2> /dev/null || true").splitlines()
    fields = [line.split() for line in lines]
    return [(int(one[0]), float(one[1]), int(one[2])) for one in fields if len(one) == 3]


@contextmanager
def restoring(host: VmHost, session: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `restore --wait`, as a user does who believes the other host dead."""
    argv = host.argv("--json", "restore", session, "--wait", "3m")
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            yield running
        finally:
            running.kill()


def answer(running: subprocess.Popen[bytes]) -> dict[str, object]:
    out, err = running.communicate(timeout=400)
    assert running.returncode == 0, (out, err.decode())
    found: dict[str, object] = json.loads(out)
    return found


def assert_b_keeps_it(vms: Machines, session: str) -> None:
    assert vms.a.cm_json("lease", "show", session)["holder"] == "host-b"
    assert vms.b.runs(session) and not vms.a.runs(session) and not vms.a.session_pids(session)
    vms.a.fails("restore", session, status=5, code="fenced")


def test_power_cut(vms: Machines) -> None:
    """host-a loses power; host-b restores the last checkpoint; host-a boots, and does not run the session."""
    a, b = vms.hosts
    session = a.counter("dies")
    a.ok("checkpoint", "dies", "--leave-running")
    a.counts_on(session)
    b.fails("restore", session, status=5, code="fenced")
    before = vms.boot_id(a)
    vms.power_cut(a)
    began = time.monotonic()
    assert b.cm_json("restore", session, "--wait", "3m", timeout=400)["token"] == 2
    took = time.monotonic() - began
    print(f"\n  restored {took:.0f} s after the power was cut, TTL {vms.fleet.ttl}")
    vms.boot(a)
    assert vms.boot_id(a) != before
    b.counts_on(session)
    assert_b_keeps_it(vms, session)
    assert a.shell("systemctl is-active cmdop-migrate-agent").strip() == "active"


def test_paused_past_its_lease(vms: Machines) -> None:
    """The hypervisor pauses host-a; host-b takes over; host-a resumes, and its copy of the session does not."""
    a, b = vms.hosts
    session = stamping(vms, "naps")
    a.ok("checkpoint", "naps", "--leave-running")
    vms.pause(a)
    assert vms.state(a) == "paused"
    assert b.cm_json("restore", session, "--wait", "3m", timeout=400)["token"] == 2
    until(lambda: stamps(b, 2), 60, "it runs on host-b")
    resumed = time.time()
    vms.resume(a)
    vms.answers(a)
    until(lambda: not a.session_pids(session), 120, "it is gone from host-a")
    late = [one for one in stamps(a, 1) if one[2] >= int(resumed)]
    ran = late[-1][1] - late[0][1] if late else 0.0
    kinds = [one["event"] for one in a.events(session)]
    print(f"\n  after {resumed:.0f} it took {len(late)} steps, within {ran:.2f} s; host-a noted {kinds[-4:]}")
    assert not late or ran < 2.0, "a pause is found out by the board's clock, long before a renewal"
    assert "fenced" in kinds or not late
    assert "superseded" in kinds
    until(lambda: not a.runs(session), 60, "host-a says so")
    assert_b_keeps_it(vms, session)


def test_link_cut_and_healed(vms: Machines) -> None:
    """host-a is cut off. It freezes its session before host-b takes over, and ends it when the link is back."""
    a, b = vms.hosts
    session = stamping(vms, "cut")
    a.ok("checkpoint", "cut", "--leave-running")
    vms.cut(a)
    try:
        with restoring(b, session) as running:
            fenced = a.wait_event(session, "fenced", 120)
            assert running.poll() is None, "host-b has it, and it did not stand still yet on host-a"
            stood = len(stamps(a, 1))
            assert answer(running)["token"] == 2
        until(lambda: stamps(b, 2), 60, "it runs on host-b")
        assert len(stamps(a, 1)) == stood and a.session_pids(session), "it stands still: there, and without a step"
        assert not [one for one in a.events(session) if one["event"] == "superseded"]
        assert a.cm("checkpoint", "cut").returncode == 6
        print(f"\n  frozen {fenced['late_ms']:.0f} ms after the deadline")
    finally:
        vms.heal(a)
    a.wait_event(session, "superseded", 120)
    until(lambda: not a.session_pids(session), 60, "it is gone from host-a")
    assert len(stamps(a, 1)) == stood
    assert_b_keeps_it(vms, session)
