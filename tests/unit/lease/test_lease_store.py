"""Test the lease store with answers that are lost, late, duplicate or wrong, and that it ignores the wall clock."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cmdop_migrate.errors import BadConfig, LeaseNewer, LeaseUnreachable, LeaseUnreadable, Usage
from cmdop_migrate.lease.etcd import REUSE, server_ttl
from cmdop_migrate.lease.margins import RHO, contender_wait, fresh_for
from cmdop_migrate.lease.memory import MemoryRegister
from cmdop_migrate.lease.register import Cell, Swap
from cmdop_migrate.lease.registry import etcd_place, open_lease
from cmdop_migrate.lease.rules import Lost, Why
from cmdop_migrate.lease.sqlite import SqliteRegister
from cmdop_migrate.lease.store import Ended, Held, LeaseStore, LeaseView, Waiting


class Flaky(MemoryRegister):
    """Run `before` and `after` around the next write; `after` may drop the answer, `before` the request."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[Swap], None] | None = None
        self.after: Callable[[Swap], None] | None = None
        self.unread = False

    def read(self, session: str) -> Cell | None:
        if self.unread:
            raise LeaseUnreachable("no answer")
        return super().read(session)

    def write(self, swap: Swap) -> str | None:
        before, self.before = self.before, None
        after, self.after = self.after, None
        if before:
            before(swap)
        answer = super().write(swap)
        if after:
            after(swap)
        return answer


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def register() -> Flaky:
    return Flaky()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(register: Flaky, clock: Clock) -> LeaseStore:
    return LeaseStore(register, clock)


def lose(_: Swap) -> None:
    raise LeaseUnreachable("timed out")


def held(answer: object) -> Held:
    assert isinstance(answer, Held), answer
    return answer


def test_lost_answer_is_recognised_by_its_nonce(register: Flaky, store: LeaseStore) -> None:
    register.after = lose
    one = held(store.acquire("s", "a", "ia", 10))
    register.after = lose
    two = held(store.renew(one))
    assert (two.token, two.record.renewals) == (1, 1)
    register.after = lose
    assert isinstance(store.park(two, "c1"), Ended)


def test_lost_request_is_unknown_until_a_later_call_succeeds(register: Flaky, store: LeaseStore) -> None:
    one = held(store.acquire("s", "a", "ia", 10))
    late: list[Swap] = []

    def delay(swap: Swap) -> None:
        late.append(swap)
        raise LeaseUnreachable("timed out")

    register.before = delay
    with pytest.raises(LeaseUnreachable):
        store.park(one, "c1")
    two = held(store.renew(one))
    assert register.write(late[0]) is None, "the late park is refused: the renewal came first"
    assert isinstance(store.inspect("s"), LeaseView) and held(store.renew(two)).record.state == "held"


def test_late_renewal_does_not_confuse_its_writer(register: Flaky, store: LeaseStore) -> None:
    one = held(store.acquire("s", "a", "ia", 10))
    late: list[Swap] = []

    def delay(swap: Swap) -> None:
        late.append(swap)
        raise LeaseUnreachable("timed out")

    register.before = delay
    with pytest.raises(LeaseUnreachable):
        store.renew(one)
    assert register.write(late[0]) is not None
    assert held(store.renew(one)).record.renewals == 2


def test_late_park_is_reported(register: Flaky, store: LeaseStore) -> None:
    one = held(store.acquire("s", "a", "ia", 10))
    late: list[Swap] = []

    def delay(swap: Swap) -> None:
        late.append(swap)
        raise LeaseUnreachable("timed out")

    register.before = delay
    with pytest.raises(LeaseUnreachable):
        store.park(one, "c1")
    register.write(late[0])
    lost = store.renew(one)
    assert isinstance(lost, Lost) and lost.why == Why.PARKED
    assert isinstance(store.park(one, "c1"), Ended), "asked again, it says that it is done"


def test_no_answer_raises_lease_unreachable(register: Flaky, store: LeaseStore) -> None:
    one = held(store.acquire("s", "a", "ia", 10))
    register.after, register.unread = lose, True
    with pytest.raises(LeaseUnreachable, match="timed out"):
        store.renew(one)
    with pytest.raises(LeaseUnreachable):
        store.acquire("s", "b", "ib", 10)


def test_command_and_agent_write_under_one_token(register: Flaky, store: LeaseStore) -> None:
    agent = held(store.acquire("s", "a", "ia", 10))
    command = held(store.acquire("s", "a", "ia", 10, resume_token=agent.token))
    held(store.commit_checkpoint(command, "c1"))
    renewed = held(store.renew(agent))
    assert (renewed.token, renewed.record.checkpoint) == (1, "c1")


def test_started_is_the_start_of_the_request_that_won(register: Flaky, store: LeaseStore, clock: Clock) -> None:
    def slow(_: Swap) -> None:
        clock.now += 7

    register.before = slow
    one = held(store.acquire("s", "a", "ia", 10))
    assert (one.started, clock.now) == (1000.0, 1007.0)
    assert one.fresh_until == 1000.0 + fresh_for(10)


def test_contender_counts_from_the_answer(register: Flaky, store: LeaseStore, clock: Clock) -> None:
    held(store.acquire("s", "a", "ia", 10))
    waiting = store.acquire("s", "b", "ib", 10)
    assert isinstance(waiting, Waiting) and waiting.seconds == contender_wait(10)
    clock.now += waiting.seconds - 0.001
    still = store.acquire("s", "b", "ib", 10, observation=waiting.observation)
    assert isinstance(still, Waiting) and 0 < still.seconds < 0.002
    clock.now += 0.002
    assert held(store.acquire("s", "b", "ib", 10, observation=still.observation)).token == 2


def test_renewal_between_read_and_swap_wins(register: Flaky, store: LeaseStore, clock: Clock) -> None:
    one = held(store.acquire("s", "a", "ia", 10))
    waiting = store.acquire("s", "b", "ib", 10)
    assert isinstance(waiting, Waiting)
    clock.now += 60

    def renewed(_: Swap) -> None:
        held(LeaseStore(register, clock).renew(one))

    register.before = renewed
    again = store.acquire("s", "b", "ib", 10, observation=waiting.observation)
    assert isinstance(again, Waiting) and again.seconds == contender_wait(10)


def test_lease_ignores_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the wall clock back an hour between all calls: the package never reads it."""
    store = LeaseStore(MemoryRegister())
    one = held(store.acquire("s", "a", "ia", 10))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    two = held(store.renew(one))
    assert 0 <= two.started - one.started < 5
    waiting = store.acquire("s", "b", "ib", 10)
    assert isinstance(waiting, Waiting) and waiting.seconds == contender_wait(10)
    package = Path(__file__).parents[3] / "cmdop_migrate/lease"
    for module in package.glob("*.py"):
        text = module.read_text()
        assert "walltime" not in text and "time.time" not in text and "datetime" not in text, module


def test_renew_many_settles_each_lease_independently(store: LeaseStore, register: Flaky) -> None:
    leases = [held(store.acquire(f"s{n}", "a", "ia", 10)) for n in range(5)]
    store.release(leases[1])
    held(store.renew(leases[2]))  # by another process of this host
    register.write(Swap("s3", b"garbage", leases[3].version))
    answers = store.renew_many(leases)
    assert [type(answer) for answer in answers] == [Held, Lost, Held, LeaseUnreadable, Held]


def test_unreadable_record_is_replaced_only_with_a_token(register: Flaky, store: LeaseStore) -> None:
    register.write(Swap("s", b"garbage", None))
    for call in (
        lambda: store.inspect("s"),
        lambda: store.acquire("s", "a", "ia", 10),
        lambda: store.force_break("s", "a", "ia"),
    ):
        with pytest.raises(LeaseUnreadable):
            call()
    assert isinstance(store.force_break("s", "a", "ia", above=41), Ended)
    assert held(store.acquire("s", "a", "ia", 10)).token == 43


def test_newer_record_is_never_overwritten(register: Flaky, store: LeaseStore) -> None:
    register.write(Swap("s", b'{"version": 2}', None))
    with pytest.raises(LeaseNewer):
        store.force_break("s", "a", "ia", above=41)
    with pytest.raises(LeaseNewer):
        store.acquire("s", "a", "ia", 10)


def test_break_supersedes_the_holder(store: LeaseStore) -> None:
    one = held(store.acquire("s", "a", "ia", 10))
    one = held(store.commit_checkpoint(one, "c1"))
    broken = store.force_break("s", "b", "ib")
    assert isinstance(broken, Ended) and (broken.record.token, broken.record.state) == (2, "parked")
    lost = store.renew(one)
    assert isinstance(lost, Lost) and lost.why == Why.SUPERSEDED and "b (token 2)" in str(lost)


@pytest.mark.parametrize("session", ["", "a/b", "../x", "-x", "a b", "x" * 200, "a\n"])
def test_invalid_session_id_is_refused(store: LeaseStore, session: str) -> None:
    with pytest.raises(Usage):
        store.acquire(session, "a", "ia", 10)
    with pytest.raises(Usage):
        store.inspect(session)


@pytest.mark.parametrize("ttl", [1.0, 2.0, 7.5, 15.0, 3600.0])
def test_etcd_keeps_a_lease_alive_as_long_as_its_holder_may_run(ttl: float) -> None:
    """Use a grant REUSE older than the write, by the slowest clock, with etcd's clock the fastest."""
    assert server_ttl(ttl) / (1 + RHO) - REUSE / (1 - RHO) >= ttl - 1e-9


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite://relative.db",
        "sqlite:///dir/",
        "s3://",
        "etcd://",
        "etcd://host:0/x",
        "etcd://host:1,,host:2/x",
        "etcd://user:secret@host:1/x",
        "etcd://user:se/secret@host:1/x",
        "etcd://host:1/a b",
        "etcd://host:1/x?ca=/not/there",
        "etcd://host:1/x?what=1",
        "mysql://host/x",
        "",
    ],
)
def test_invalid_lease_url_is_refused(url: str) -> None:
    with pytest.raises(BadConfig) as told:
        open_lease(url)
    assert told.value.hint and "secret" not in told.value.message


def test_etcd_url() -> None:
    place = etcd_place("etcd://a:1,b,[::1]:3/x/y")
    assert place.endpoints == (("a", 1), ("b", 2379), ("::1", 3))
    assert (place.prefix, etcd_place("etcd://a").prefix) == ("x/y", "cmdop-migrate")


def test_sqlite_file_is_private_and_its_removal_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "new/dir/lease.db"
    store = open_lease(f"sqlite://{path}")
    one = held(store.acquire("s", "a", "ia", 10))
    assert path.parent.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
    for left in path.parent.iterdir():
        left.unlink()
    lost = store.renew(one)
    assert isinstance(lost, Lost) and lost.why == Why.GONE, "it must not go on in a file that nobody else can see"


def test_two_connections_of_one_process_see_what_other_processes_write(tmp_path: Path) -> None:
    """Open the file twice in one process: it keeps its locks, so no other process removes the log it reads."""
    path = tmp_path / "lease.db"
    first, second = SqliteRegister(path), SqliteRegister(path)
    assert first.write(Swap("a" * 24, b"x", None))
    assert second.read("a" * 24) is not None
    script = (
        "import sys; from pathlib import Path; from cmdop_migrate.lease.register import Swap;"
        " from cmdop_migrate.lease.sqlite import SqliteRegister; one = SqliteRegister(Path(sys.argv[1]));"
        " assert one.write(Swap(sys.argv[2], b'x', None)); one.close()"
    )
    for letter in "bcd":
        subprocess.run([sys.executable, "-c", script, path, letter * 24], check=True, timeout=30)
        assert first.read(letter * 24) is not None and second.read(letter * 24) is not None, letter
    first.close()
    second.close()


def test_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lease.db").write_bytes(b"something else" * 100)
    with pytest.raises(LeaseUnreachable) as told:
        open_lease(f"sqlite://{tmp_path}/lease.db").inspect("s")
    assert told.value.hint
