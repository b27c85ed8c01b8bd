"""What the agent and `resume` do about leases, step by step, with records on disk and a lease store in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cmdop_migrate import config
from cmdop_migrate.agent.daemon import Agent
from cmdop_migrate.host.agent_process import Lock, RunningAgent, holder_of
from cmdop_migrate.host.host import Host as LocalHost
from cmdop_migrate.host.move_journal import Move
from cmdop_migrate.lease.memory import MemoryRegister
from cmdop_migrate.lease.register import Cell
from cmdop_migrate.lease.store import Held, LeaseStore
from cmdop_migrate.migration.ownership import MoveOutcome, MoveSettlement
from cmdop_migrate.model import Exit, Record, Spec
from tests.support.disk import fill, tmpfs

SESSION = "a" * 24
TTL = 15.0


class Register(MemoryRegister):
    """`before_read` is called once."""

    before_read: Callable[[], None] | None = None

    def read(self, session: str) -> Cell | None:
        call, self.before_read = self.before_read, None
        if call is not None:
            call()
        return super().read(session)


@pytest.fixture
def records(tmp_path: Path) -> LocalHost:
    places = {"CMDOP_MIGRATE_STATE_DIR": str(tmp_path / "s"), "CMDOP_MIGRATE_RUN_DIR": str(tmp_path / "r")}
    made = LocalHost(
        config.load(environ={**places, "CMDOP_MIGRATE_CONFIG": os.devnull, "CMDOP_MIGRATE_HOST": "host-a"})
    )
    made.prepare()
    made.directory(SESSION).mkdir()
    return made


def write(records: LocalHost, token: int, **facts: object) -> None:
    record = Record(SESSION, "w", "host-a", token, "parked", Spec(("true",), "/", "root", ()), 0.0, checkpoint="c2")
    records.save(replace(record, **facts))  # type: ignore[arg-type]  # of several types: each test's own


def test_agent_lock_holds_on_a_full_disk(records: LocalHost) -> None:
    with tmpfs(records.config.run_dir, 64 << 10) as place:
        lock = Lock.take(records.config)
        assert lock is not None
        ballast = fill(place)
        lock.note("wss://a")
        assert holder_of(records.config) is None, "nothing says who"
        assert Lock.take(records.config) is None, "and yet there is one"
        ballast.unlink()
        lock.note("wss://a")
        assert holder_of(records.config) == RunningAgent(os.getpid(), "wss://a")
        lock.release()


def take(records: LocalHost, leases: LeaseStore) -> Held:
    held = leases.acquire(SESSION, "host-a", records.instance(), TTL)
    assert isinstance(held, Held)
    return held


def test_resume_does_not_park_a_lease_that_a_restore_here_holds(records: LocalHost) -> None:
    """`resume` looks whether the session is being restored here, and then at its lease: one may begin in between."""
    register = Register()
    leases = LeaseStore(register)
    first = take(records, leases)
    leases.park(first, "c2")
    write(records, first.token)
    locks: list[int | None] = []

    def restore() -> None:
        locks.append(records.take(SESSION))
        take(records, leases)

    register.before_read = restore
    move = Move("m", SESSION, "w", "host-a", "host-b", first.token, 0.0, checkpoint="c2", parent="c1")
    settling = MoveSettlement(records, leases, move, lambda *_: None)
    try:
        assert not isinstance(settling.once(), MoveOutcome)
        seen = leases.inspect(SESSION)
        assert seen is not None and (seen.record.state, seen.record.token) == ("held", first.token + 1)
    finally:
        os.close(locks[0] or 0)
    found = settling.once()  # the restore was killed: now it is
    seen = leases.inspect(SESSION)
    assert isinstance(found, MoveOutcome) and seen is not None and seen.record.state == "parked"


def test_lease_of_a_session_restored_and_ended_between_two_rounds_is_released(records: LocalHost) -> None:
    """The incarnation before is still known: what is owed to the last one is not forgotten over it."""
    leases = LeaseStore(MemoryRegister())
    lock = Lock.take(records.config)
    assert lock is not None
    agent = Agent(records, leases, lock, until_idle=True)
    agent.seen = set()
    agent.held[SESSION] = first = take(records, leases)
    leases.park(first, "c2")
    second = take(records, leases)
    write(records, second.token, phase="exited", exit=Exit(0, "exited 0", 0.0, "exited"))
    agent.step()
    lock.release()
    seen = leases.inspect(SESSION)
    assert seen is not None and (seen.record.state, seen.record.checkpoint) == ("free", None)
