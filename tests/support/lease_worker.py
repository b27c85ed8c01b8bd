"""Run one worker of tests/integration/test_lease_history.py: acquire, renew and release leases at random, and record
beliefs.

It may be stopped, killed and cut off at any instant; that is the test.

    python -m tests.support.lease_worker URL NAME SEED FILE STATE SESSION…
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from cmdop_migrate.clock import boottime
from cmdop_migrate.errors import LeaseUnreachable
from cmdop_migrate.lease.margins import freeze_allowance, renew_every
from cmdop_migrate.lease.register import Register
from cmdop_migrate.lease.registry import etcd_place, open_register
from cmdop_migrate.lease.rules import Lost, Observation
from cmdop_migrate.lease.sqlite import SqliteRegister
from cmdop_migrate.lease.store import Held, LeaseStore, Waiting
from tests.support.lease_history import Event, line

TTLS = (0.5, 0.8, 1.2)


class Worker:
    def __init__(self, store: LeaseStore, name: str, seed: int, file: Path, state: Path) -> None:
        self.store = store
        self.name = name
        self.random = random.Random(seed)
        self.out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.state = state
        self.leases: dict[str, Held] = {}
        self.seen: dict[str, Observation | None] = {}
        self.steps = 0

    def note(self, what: str, session: str, token: int, began: float, until: float = 0.0) -> None:
        os.write(self.out, line(Event(what, self.name, session, token, boottime(), began, until)))

    def resume(self, sessions: list[str]) -> None:
        """Continue with the leases that were held before a crash, as an agent does."""
        tokens = json.loads(self.state.read_text()) if self.state.exists() else {}
        for session in sessions:
            if session in tokens and self.random.random() < 0.7:
                self.attempt(session, resume=tokens[session])

    def remember(self) -> None:
        fresh = self.state.with_suffix(".new")
        fresh.write_text(json.dumps({session: lease.token for session, lease in self.leases.items()}))
        fresh.replace(self.state)

    def step(self, session: str) -> None:
        self.steps += 1
        lease = self.leases.get(session)
        try:
            if lease is None:
                self.attempt(session)
            else:
                self.hold(session, lease)
        except LeaseUnreachable:
            pass  # what is held runs on, until it is no longer fresh; what is asked for is asked for again

    def attempt(self, session: str, resume: int | None = None) -> None:
        # No worker observes the last session: only a backend that finds expired leases by itself releases its lease.
        watched = session != "s-unwatched"
        seen = self.seen.get(session) if watched else None
        ttl = self.random.choice(TTLS)
        answer = self.store.acquire(session, self.name, self.name, ttl, observation=seen, resume_token=resume)
        self.seen[session] = answer.observation if isinstance(answer, Waiting) else None
        if isinstance(answer, Held):
            self.leases[session] = answer
            self.note("held" if resume is None else "renewed", session, answer.token, answer.started, _until(answer))
            self.remember()

    def hold(self, session: str, lease: Held) -> None:
        began = boottime()
        luck = self.random.random()
        if luck < 0.03:
            self.note("stopped", session, lease.token, began)
            del self.leases[session]
            self.remember()
            ended = self.store.park(lease, f"c{self.steps}") if luck < 0.015 else self.store.release(lease)
            if not isinstance(ended, Lost):
                self.note("wrote", session, lease.token, began)
            return
        if luck < 0.04:  # forgets it, as a host that dies does
            del self.leases[session]
            self.remember()
            return
        if began - lease.started < renew_every(lease.record.ttl) and luck > 0.2:
            return
        answer = self.store.commit_checkpoint(lease, f"c{self.steps}") if luck < 0.1 else self.store.renew(lease)
        if isinstance(answer, Held):
            self.leases[session] = answer
            self.note("renewed", session, answer.token, answer.started, _until(answer))
        else:
            del self.leases[session]
            self.remember()


def _until(lease: Held) -> float:
    """Return the last instant at which the worker might still run the session."""
    return lease.fresh_until + freeze_allowance(lease.record.ttl)


def impatient(url: str) -> Register:
    """Return time-outs that fit TTLs of half a second."""
    if url.startswith("s3://"):
        from cmdop_migrate.lease.s3 import S3Register
        from cmdop_migrate.storage.registry import s3_place
        from cmdop_migrate.storage.s3client import S3Limits

        return S3Register(s3_place(url), S3Limits(connect=0.3, read=0.6), proven=True)
    if url.startswith("etcd://"):
        from cmdop_migrate.lease.etcd import EtcdRegister
        from cmdop_migrate.lease.etcdhttp import EtcdLimits

        return EtcdRegister(etcd_place(url), EtcdLimits(attempt=0.3, total=0.6))
    if url.startswith("sqlite://"):
        return SqliteRegister(Path(url.removeprefix("sqlite://")), timeout=0.5)
    return open_register(url)


def main(url: str, name: str, seed: int, file: Path, state: Path, sessions: list[str]) -> None:
    worker = Worker(LeaseStore(impatient(url)), name, seed, file, state)
    try:
        worker.resume(sessions)
    except LeaseUnreachable:
        pass
    steps = os.open(f"{file}.steps", os.O_WRONLY | os.O_CREAT, 0o600)
    while True:
        worker.step(worker.random.choice(sessions))
        os.pwrite(steps, b"%d" % worker.steps, 0)
        time.sleep(worker.random.random() * 0.01)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]), sys.argv[6:])
