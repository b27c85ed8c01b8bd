"""Test the contract of lease/register.py against every backend, and the lease store over each of them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cmdop_migrate.errors import LeaseNewer, LeaseUnreadable, Usage
from cmdop_migrate.lease.register import Register, Swap
from cmdop_migrate.lease.registry import open_lease
from cmdop_migrate.lease.rules import Lost, Why
from cmdop_migrate.lease.store import Ended, Held, LeaseStore, LeaseView, Waiting
from tests.support.patience import bound


def held(answer: object) -> Held:
    assert isinstance(answer, Held), answer
    return answer


def test_register_is_empty_at_first(register: Register) -> None:
    register.check()
    assert register.read("s") is None
    assert list(register.sessions()) == []


def test_write_needs_the_version_it_replaces(register: Register) -> None:
    assert register.write(Swap("s", b"none yet", "1")) is None
    one = register.write(Swap("s", b"one", None))
    assert one is not None
    assert register.write(Swap("s", b"again", None)) is None
    two = register.write(Swap("s", b"two", one, live_for=5.0))
    assert two is not None and two != one
    assert register.write(Swap("s", b"late", one)) is None
    assert register.write(Swap("s", b"odd", "no version of ours")) is None
    found = register.read("s")
    assert found is not None and (found.data, found.version, found.lapsed) == (b"two", two, False)


def test_register_round_trips_bytes(register: Register) -> None:
    data = bytes(range(256)) * 8
    version = register.write(Swap("s", data, None))
    found = register.read("s")
    assert found is not None and (found.data, found.version) == (data, version)


def test_sessions_are_separate_and_listed_in_order(register: Register) -> None:
    names = ["b", "a", "a.b", "A", "a-b", "x" * 127]
    for name in names:
        assert register.write(Swap(name, name.encode(), None)) is not None
    assert list(register.sessions()) == sorted(names)
    found = [register.read(name) for name in names]
    assert [one.data for one in found if one] == [name.encode() for name in names]


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "x" * 128, "ü"])
def test_invalid_session_id_is_refused_first(register: Register, name: str) -> None:
    with pytest.raises(Usage):
        register.read(name)
    with pytest.raises(Usage):
        register.write(Swap(name, b"x", None))
    with pytest.raises(Usage):
        register.write_many([Swap(name, b"x", None)])


def test_one_of_several_concurrent_writes_wins(register: Register) -> None:
    expected: str | None = None
    for turn in range(6):
        racers = 4
        barrier = threading.Barrier(racers)

        swaps = [Swap("s", f"{turn}-{who}".encode(), expected) for who in range(racers)]

        def race(swap: Swap, barrier: threading.Barrier = barrier) -> str | None:
            barrier.wait(30)
            return register.write(swap)

        with ThreadPoolExecutor(racers) as pool:
            won = [(who, version) for who, version in enumerate(pool.map(race, swaps)) if version is not None]
        found = register.read("s")
        assert found is not None
        assert len(won) == 1 and won[0][1] == found.version and found.data == f"{turn}-{won[0][0]}".encode()
        expected = found.version


def test_write_many_settles_each_swap_independently(register: Register) -> None:
    count = register.batch * 2 + 3 if register.batch < 100 else 20
    first = register.write_many([Swap(f"s{n:04}", b"one", None, live_for=5.0) for n in range(count)])
    assert all(isinstance(version, str) for version in first)
    swaps = [Swap(f"s{n:04}", b"two", str(version)) for n, version in enumerate(first)]
    swaps[1] = Swap("s0001", b"two", "77")
    second = register.write_many(swaps[: register.batch] if register.batch > 1 else swaps)
    assert second[1] is None and all(isinstance(version, str) for version in [second[0], *second[2:]])
    found = register.read("s0001")
    assert found is not None and found.data == b"one"


def test_life_of_a_lease(register: Register) -> None:
    """Acquire, contend, renew, commit, park, restore elsewhere, end: the token grows, and each host gets the right
    answer."""
    store = LeaseStore(register)
    a = held(store.acquire("s", "host-a", "ia", 20))
    assert a.token == 1
    waiting = store.acquire("s", "host-b", "ib", 20)
    assert isinstance(waiting, Waiting) and waiting.holder.host == "host-a" and waiting.seconds > 20
    a = held(store.renew(a))
    a = held(store.commit_checkpoint(a, "c1"))
    parked = store.park(a, "c2")
    assert isinstance(parked, Ended) and parked.record.state == "parked"
    lost = store.acquire("s", "host-b", "ib", 20, expect_checkpoint="c1")
    assert isinstance(lost, Lost) and lost.why == Why.CHECKPOINT
    b = held(store.acquire("s", "host-b", "ib", 20, expect_checkpoint="c2"))
    assert b.token == 2
    for late in (store.renew(a), store.park(a, "c3"), store.commit_checkpoint(a, "c3"), store.release(a)):
        assert isinstance(late, Lost) and late.why == Why.SUPERSEDED and late.holder is not None
        assert late.holder.host == "host-b"
    seen = store.inspect("s")
    assert isinstance(seen, LeaseView) and (seen.record.checkpoint, seen.record.token, seen.lapsed) == ("c2", 2, False)
    assert isinstance(store.release(b), Ended)
    assert held(store.acquire("s", "host-a", "ia", 20)).token == 3


def test_dead_holder_is_superseded_after_its_ttl(register: Register) -> None:
    store = LeaseStore(register)
    a = held(store.acquire("s", "host-a", "ia", 0.6))
    answer: object = None
    seen = None
    deadline = time.monotonic() + bound(20)
    while not isinstance(answer, Held) and time.monotonic() < deadline:
        answer = store.acquire("s", "host-b", "ib", 0.6, observation=seen)
        if isinstance(answer, Waiting):
            seen = answer.observation
            time.sleep(min(0.05, answer.seconds))
    b = held(answer)
    assert b.token == 2 and b.started >= a.started + 0.6
    assert isinstance(store.renew(a), Lost)


def test_holder_renews_past_its_ttl_if_no_other_host_took_over(register: Register) -> None:
    store = LeaseStore(register)
    a = held(store.acquire("s", "host-a", "ia", 0.2))
    time.sleep(0.5)
    assert held(store.renew(a)).token == 1


def test_restarted_agent_resumes_its_lease(register: Register) -> None:
    store = LeaseStore(register)
    a = held(store.acquire("s", "host-a", "ia", 20))
    again = held(store.acquire("s", "host-a", "ia", 20, resume_token=a.token))
    assert again.token == a.token
    impostor = store.acquire("s", "host-a", "another-installation", 20, resume_token=a.token)
    assert isinstance(impostor, Lost) and impostor.why == Why.SUPERSEDED


def test_renew_many(register: Register) -> None:
    store = LeaseStore(register)
    leases = [held(store.acquire(f"s{n}", "host-a", "ia", 20)) for n in range(7)]
    assert isinstance(store.release(leases[3]), Ended)
    answers = store.renew_many(leases)
    assert [type(one) for one in answers] == [Held] * 3 + [Lost] + [Held] * 3
    assert all(one.record.renewals == 1 for one in answers if isinstance(one, Held))


def test_garbage_and_newer_records(register: Register) -> None:
    store = LeaseStore(register)
    register.write(Swap("bad", b"\xff\x00", None))
    register.write(Swap("new", b'{"version":9}', None))
    register.write(Swap("empty", b"", None))
    for name, kind in (("bad", LeaseUnreadable), ("new", LeaseNewer), ("empty", LeaseUnreadable)):
        with pytest.raises(kind):
            store.inspect(name)
        with pytest.raises(kind):
            store.acquire(name, "host-a", "ia", 20)


WINNER = """
import sys, time
from cmdop_migrate.lease.registry import open_lease
from cmdop_migrate.lease.store import Held
store = open_lease(sys.argv[1], proven=True)
who = sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
won = []
for turn in range(10):
    answer = store.acquire(f"s{turn}", who, who, 60)
    if isinstance(answer, Held):
        won.append(turn)
print(",".join(map(str, won)))
"""


def test_processes_share_a_register(lease_url: str) -> None:
    open_lease(lease_url).check()
    command = [sys.executable, "-c", WINNER, lease_url]
    workers = [
        subprocess.Popen([*command, f"h{n}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for n in range(3)
    ]
    try:
        for one in workers:
            assert one.stdout is not None and one.stdout.readline() == "ready\n"
        for one in workers:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        won = [int(turn) for one in workers for turn in one.communicate(timeout=60)[0].strip().split(",") if turn]
    finally:
        for one in workers:
            one.kill()
            one.wait()
    assert sorted(won) == list(range(10)), "each lease has exactly one winner"
