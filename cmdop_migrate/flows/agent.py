"""The agent: one process a host. Renews the leases of all its sessions, and hands each holder its time.

It may die at any moment and be started again: sessions do not notice until
their time runs out, and then stand still until it is back. What it finds out
about a session that is no longer ours it acts on itself, whether or not the
holder answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cmdop_migrate
from cmdop_migrate import clock, log
from cmdop_migrate import config as settings
from cmdop_migrate.config import Config
from cmdop_migrate.errors import Blocked, CmdopError, Fenced, TimedOut, Unexpected, Unreachable, from_code
from cmdop_migrate.flows import leases as host_leases
from cmdop_migrate.lease import margins
from cmdop_migrate.lease.rules import Lost, Why
from cmdop_migrate.lease.store import Held, LeaseStore, Renewed, Waiting
from cmdop_migrate.model import Record
from cmdop_migrate.session import cgroup
from cmdop_migrate.session.channel import Channel, HolderGone
from cmdop_migrate.session.records import Records

TELL_TIMEOUT = 1.0
IDLE_ROUNDS = 2
START_TIMEOUT = 30.0
_log = log.get("agent")


class Metrics:
    """Counters in Prometheus' text form, written whole to a file a collector reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, float] = {}

    def add(self, name: str, count: float = 1) -> None:
        self.values[name] = self.values.get(name, 0) + count

    def set(self, name: str, value: float) -> None:
        self.values[name] = value

    def write(self) -> None:
        lines = [f"cmdop_migrate_{name} {value:g}" for name, value in sorted(self.values.items())]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("\n".join(lines) + "\n", encoding="ascii")
        temporary.replace(self._path)


class Agent:
    def __init__(
        self, records: Records, leases: LeaseStore, lock: Lock, until_idle: bool, stop: Callable[[], bool]
    ) -> None:
        self.records, self.leases, self.config, self.lock = records, leases, records.config, lock
        self.until_idle, self.stop = until_idle, stop
        self.held: dict[str, Held] = {}
        self.channels: dict[str, Channel] = {}
        self.metrics = Metrics(self.config.run_dir / "metrics.prom")
        self.host_lease: Held | None = None

    def run(self) -> None:
        """Until told to stop, or, started on demand, until there is nothing to do."""
        idle = 0
        while not self.stop():
            began = clock.boottime()
            busy = self.step()
            idle = 0 if busy else idle + 1
            if self.until_idle and idle >= IDLE_ROUNDS and self._may_leave():
                return
            every = margins.renew_every(self.config.lease_ttl) if busy else 0.5
            self._sleep(max(0.0, every - (clock.boottime() - began)))

    def _sleep(self, seconds: float) -> None:
        """Wakes early for sessions that have come meanwhile: theirs was taken by the one who started them."""
        until = clock.boottime() + seconds
        while not self.stop() and clock.boottime() < until:
            time.sleep(min(0.2, max(0.0, until - clock.boottime())))
            if self.until_idle and not self._live():
                return

    def _may_leave(self) -> bool:
        """Nobody is starting or restoring a session right now who counts on us."""
        with self.records.locked():
            if any(map(self.records.is_held, self.records.ids())):
                return False
            self.lock.release()
            return True

    def _live(self) -> dict[str, Record]:
        return {record.session: record for record in self.records.all() if record.phase == "live"}

    def step(self) -> bool:
        """One round: every lease renewed, every holder told. -> whether there are sessions."""
        live = self._live()
        for session in [one for one in self.held if one not in live]:
            self._ended(session)
        for session, record in live.items():
            if session not in self.held:
                self._resume(record)
        known = list(self.held.values())
        began = time.monotonic()
        answers = self.leases.renew_many(known) if known else []
        self.metrics.set("renew_seconds", time.monotonic() - began)
        with ThreadPoolExecutor(8, "tell") as pool:
            for lease, answer in zip(known, answers, strict=True):
                pool.submit(self._heard, live[lease.session], answer)
        self._renew_host()
        self.metrics.set("sessions", len(live))
        with contextlib.suppress(OSError):
            self.metrics.write()
        return bool(live)

    def _resume(self, record: Record) -> None:
        try:
            answer = self.leases.acquire(
                record.session,
                self.config.host,
                self.records.host_id(),
                self.config.lease_ttl,
                resume_token=record.token,
            )
        except CmdopError as error:
            self._unreachable(record, error)
            return
        if isinstance(answer, Held):
            self.held[record.session] = answer
        elif isinstance(answer, Lost):
            self._lost(record, answer)

    def _heard(self, record: Record, answer: Renewed) -> None:
        try:
            if isinstance(answer, Held):
                self.held[record.session] = answer
                self.metrics.add("renewals_total")
                self._tell(record, op="fresh", until=answer.fresh_until, token=answer.token)
            elif isinstance(answer, Lost):
                self._lost(record, answer)
            else:
                self._unreachable(record, answer)
        except Exception:  # noqa: BLE001 - a supervising loop: one session's trouble is not the others'
            _log.error("session %s", record.session, exc_info=True)

    def _unreachable(self, record: Record, error: CmdopError) -> None:
        """Nothing is known. The holder stops the session when its time is over; should it hang, we do."""
        self.metrics.add("renewal_failures_total")
        _log.warning("session %s: %s", record.name, error.message)
        lease = self.held.get(record.session)
        if lease is not None and clock.boottime() >= lease.fresh_until:
            cgroup.order_freeze(self.records.cgroup(record.session))

    def _lost(self, record: Record, lost: Lost) -> None:
        """Not ours any more: whatever the holder does, not one more step of it."""
        self.held.pop(record.session, None)
        holder = lost.holder
        if lost.why is Why.PARKED and holder is not None and holder.checkpoint:
            self._tell(record, op="parked", checkpoint=holder.checkpoint)
            return
        cgroup.kill(self.records.cgroup(record.session))
        self.metrics.add("superseded_total")
        token, host = (holder.token, holder.host) if holder else (record.token + 1, "nobody")
        facts = {"name": record.name, "token": record.token, "by": token, "where": host}
        self.records.events.emit("superseded", record.session, **facts)
        self._tell(record, op="superseded", token=max(token, record.token + 1), host=host)

    def _ended(self, session: str) -> None:
        """It exited here: nobody holds it any more. One that was parked has been let go of by who parked it."""
        self._drop_channel(session)
        record = self.records.load(session)
        lease = self.held[session]
        if record is not None and record.phase == "parked":
            del self.held[session]
            return
        died = record is not None and record.exit is not None and record.exit.code is None
        try:
            self.leases.release(lease, keep_checkpoint=died)  # one whose holder died may come back from the store
            del self.held[session]
        except Unreachable as error:
            _log.warning("lease of %s not released yet: %s", session, error.message)

    def _tell(self, record: Record, **message: object) -> None:
        for _ in range(2):  # the second time over a fresh connection
            try:
                channel = self.channels.get(record.session) or Channel(self.records.socket(record.session))
                self.channels[record.session] = channel
                channel.ask(timeout=TELL_TIMEOUT, **message)
                return
            except (HolderGone, TimedOut, OSError):
                self._drop_channel(record.session)

    def _drop_channel(self, session: str) -> None:
        channel = self.channels.pop(session, None)
        if channel is not None:
            channel.sock.close()

    def _renew_host(self) -> None:
        """One host, one name: another installation under our name is told, or tells us."""
        if self.host_lease is None:
            return
        with contextlib.suppress(Unreachable):
            answer = self.leases.renew(self.host_lease)
            if isinstance(answer, Lost):
                raise _same_name(self.config.host)
            self.host_lease = answer

    def take_name(self) -> None:
        """Fenced when another installation lives under this host's name; waits for a dead one's lease to run out."""
        name, instance, ttl = f"host.{self.config.host}", self.records.host_id(), self.config.lease_ttl
        seen = self.leases.inspect(name)
        if seen is not None and seen.record.instance == instance and seen.record.state == "held":
            answer = self.leases.acquire(name, self.config.host, instance, ttl, resume_token=seen.record.token)
        else:
            answer = self.leases.acquire(name, self.config.host, instance, ttl)
        until = clock.boottime() + margins.contender_wait(ttl) + 5
        while isinstance(answer, Waiting) and clock.boottime() < until and not self.stop():
            before = answer.observation
            time.sleep(min(answer.seconds + 0.01, 0.5))
            answer = self.leases.acquire(name, self.config.host, instance, ttl, observation=before)
            if isinstance(answer, Waiting) and answer.observation != before:
                break  # it renews: it lives
        if not isinstance(answer, Held):
            raise _same_name(self.config.host)
        self.host_lease = answer


def _same_name(host: str) -> Fenced:
    return Fenced(
        f"another installation runs under the name {host!r}", "Give this host another name: the `host` setting."
    )


class Lock:
    """Held by the one agent of this host, as long as it lives."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, config: Config) -> Lock | None:
        fd = os.open(config.run_dir / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return cls(fd)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def serve(records: Records, until_idle: bool, on_ready: Callable[[], None]) -> None:
    """What `cmdop-migrate agent` does."""
    lock = Lock.take(records.config)
    if lock is None:
        raise Blocked(f"{records.config.host} has an agent already", "One is enough; see: cmdop-migrate ls")
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        group = os.path.join(os.path.dirname(records.cgroup("agent")), "agent")
        cgroup.create(group)
        cgroup.join(group)  # out of the login session it may have been started from
        agent = Agent(records, host_leases.open_store(records.config), lock, until_idle, stopped.is_set)
        agent.take_name()
        agent.step()
        on_ready()
        agent.run()
    finally:
        lock.release()


def ensure(config: Config) -> None:
    """Starts an agent if this host has none, and waits until it renews. Raises what it failed with."""
    lock = Lock.take(config)
    if lock is None:
        return
    lock.release()
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "cmdop_migrate", "agent", "--until-idle", "--ready-fd", str(writer)]
    package = str(Path(cmdop_migrate.__file__).parent.parent)
    log_file = config.log_file.with_name("agent.log")
    log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log_file.open("ab") as errors:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=(writer,),
            start_new_session=True,
            cwd="/",
            env={**os.environ, **settings.to_environment(config), "PYTHONPATH": package},
        )
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        if not select.select([said], [], [], START_TIMEOUT)[0]:
            raise Unexpected("the agent did not get ready", f"See {log_file}.")
        word = said.read()
    if word.startswith(b"{"):
        raise from_code(**json.loads(word))
    if word != b"ready" and Lock.take(config) is not None:
        raise Unexpected("the agent ended at once", f"See {log_file}.")
