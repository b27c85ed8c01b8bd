"""A move between hosts that are cut off half-way: one copy of the session resumes, and the other never does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from cmdop_migrate.holder import cgroup
from cmdop_migrate.host.resources import TEST_STOP
from tests.support import fenced_sessions
from tests.support.host import until
from tests.support.lab_hosts import LabHost, TestLab, a_lab
from tests.support.patience import bound

COUNT = "while :; do echo n $((++i)); sleep 0.05; done"


@pytest.fixture(scope="module")
def lab() -> Iterator[TestLab]:
    with a_lab(hosts=2, lease="etcd", ttl="3s") as made:
        yield made


def numbers(host: LabHost, session: str) -> list[int]:
    text = str(host.cm_json("output", session)["data"])
    found = [int(line[2:]) for line in text.splitlines() if line.startswith("n ")]
    assert found == list(range(1, len(found) + 1)), found
    return found


def counts_on(host: LabHost, session: str) -> None:
    first = len(numbers(host, session))
    until(lambda: len(numbers(host, session)) > first + 3, 30, f"it counts on from {first} on {host.name}")


@contextlib.contextmanager
def migration_at(host: LabHost, name: str, step: str) -> Iterator[subprocess.Popen[bytes]]:
    argv = host.argv("--json", "migrate", name, "--to", "host-b", env={TEST_STOP: step})
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as cli:
        try:
            until(lambda: cli.poll() is not None or host.stopped(), 60, f"it stands at {step}")
            assert cli.poll() is None, cli.communicate()
            yield cli
        finally:
            go_on(host)
            with contextlib.suppress(subprocess.TimeoutExpired):
                cli.communicate(timeout=90)
            cli.kill()


def go_on(host: LabHost) -> None:
    for pid in host.stopped():
        os.kill(pid, signal.SIGCONT)


def test_there_and_back_over_the_network(lab: TestLab) -> None:
    a, b = lab.hosts
    session = a.start("bash", "-c", COUNT, name="w")["session"]
    for here, there in ((a, b), (b, a)):
        facts = here.cm_json("migrate", "w", "--to", there.name, timeout=120)
        assert (facts["from"], facts["to"]) == (here.name, there.name)
        counts_on(there, session)
        assert not here.pids(session) and there.pids(session)
    assert fenced_sessions.lease(a, session)["token"] == 3
    a.ok("kill", "w", "--signal", "KILL")


def test_a_target_that_is_cut_off_when_it_should_take_over(lab: TestLab) -> None:
    """The session resumes on the source within seconds; the target, when reconnected, has nothing to restore."""
    a, b = lab.hosts
    session = a.start("bash", "-c", COUNT, name="cut")["session"]
    with migration_at(a, "cut", "checkpoint:committing") as cli:
        before = len(numbers(a, session))
        assert cgroup.is_frozen(a.group(session))
        lab.cut("host-b")
        try:
            began = time.monotonic()
            go_on(a)
            out, err = cli.communicate(timeout=90)
            took = time.monotonic() - began
        finally:
            lab.heal("host-b")
    error = json.loads(out)["error"]
    assert (error["code"], error["exit"]) == ("peer_lost", 9), (error, err)
    assert "keeps running here (token 2)" in error["hint"]
    assert took < bound(25), "it was frozen for longer than it takes to see that no host took it"
    counts_on(a, session)
    assert len(numbers(a, session)) > before and not b.pids(session)
    assert a.cm_json("resume") == {"migrations": []}
    assert a.cm_json("migrate", "cut", "--to", "host-b", timeout=120)["token"] == 3
    counts_on(b, session)
    b.ok("kill", "cut", "--signal", "KILL")


def test_a_source_that_is_cut_off_when_the_target_has_it(lab: TestLab) -> None:
    """The session runs on the target; the copy on the source stays frozen until the lease can be read."""
    a, b = lab.hosts
    session = a.start("bash", "-c", COUNT, name="off")["session"]
    with migration_at(a, "off", "migrate:begin restore") as cli:
        until(lambda: b.pids(session), 30, "it runs there")
        lab.cut("host-a")
        try:
            stood = cgroup.is_frozen(a.group(session))
            for pid in a.stopped():
                os.kill(pid, signal.SIGKILL)
            cli.communicate(timeout=30)
            time.sleep(4)  # more than a TTL
            assert stood and cgroup.is_frozen(a.group(session)), "the copy must not go on"
            counts_on(b, session)
        finally:
            lab.heal("host-a")
    found = until(lambda: ended(a), 60, "resume knows")
    assert [(one["session"], one["ended"]) for one in found] == [(session, "on_target")]
    assert not a.pids(session) and b.pids(session)
    b.ok("kill", "off", "--signal", "KILL")


def ended(host: LabHost) -> list[dict[str, str]]:
    done = host.cm("--json", "resume", timeout=90)
    if done.returncode != 0:
        assert done.returncode in (4, 6, 11), done.stdout
        return []
    found: list[dict[str, str]] = json.loads(done.stdout)["migrations"]
    return found
