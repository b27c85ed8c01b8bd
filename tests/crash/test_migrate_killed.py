"""Kill each process of a migration at every step: the session ends in exactly one place, its memory intact, and `resume`
reports where. All steps of one victim are tested together: one session each, its migration stopped at that step.

With the holder, or with all of host-a, dies the session; before all of it is captured nothing is left of it: `exited`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cmdop_migrate.holder import cgroup
from cmdop_migrate.util.faults import TEST_STOP
from tests.crash.witness import Witness, show
from tests.support.etcd_server import etcd
from tests.support.host import CM, Host, open_files, processes, until
from tests.support.host_pair import World, two
from tests.support.sampling import sample
from tests.support.servers import seaweed

# Where it stands, and where that is. Up to "commit" the lease is the source's.
STEPS = {
    "plan": "migrate:begin plan",
    "stand-by": "migrate:begin stand-by",
    "dump": "checkpoint:dump",
    "upload": "checkpoint:upload",
    "hand-over": "migrate:hand-over",
    "commit": "checkpoint:committing",
    "take": "there:lease",
    "make": "there:pre-resume",
    "run": "there:resumed",
    "forget": "migrate:begin forget",
}
CAPTURED_FROM = {"the holder": "upload", "host-a": "hand-over"}  # what dies after this step leaves a whole checkpoint
TTL = "4s"
SAMPLE = 4  # steps for each victim in the default run


@dataclass
class Cell:
    world: World
    step: str
    one: Witness
    cli: subprocess.Popen[bytes]
    standing: psutil.Process | None = None
    end: str = ""

    @classmethod
    def begin(cls, world: World, step: str, made: list[Cell]) -> None:
        one = Witness.start(world.a, step)
        flow, name = STEPS[step].split(":")
        if flow == "there":
            world.stop_there(one.session, name)
        cli = subprocess.Popen(
            [*CM, "--json", "migrate", one.session, "--to", "host-b"],
            env=world.a.env(**({} if flow == "there" else {TEST_STOP: STEPS[step]})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        made.append(cell := cls(world, step, one, cli))
        cell.standing = until(cell._find, 90, f"it stands at {step}")
        (world.dir / "stops" / one.session).unlink(missing_ok=True)

    def _find(self) -> psutil.Process | None:
        if self.cli.poll() is not None:
            raise AssertionError(f"{self.step}: {self.cli.communicate()}")
        time.sleep(0.05)
        there = STEPS[self.step].startswith("there:")
        for one in restorers(self.one.session) if there else [psutil.Process(self.cli.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.status() == psutil.STATUS_STOPPED:
                    return one
        return None

    def go_on(self) -> None:
        pids = [self.cli.pid, *(one.pid for one in restorers(self.one.session))]
        for pid in [self.standing.pid] if self.standing else pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).send_signal(signal.SIGCONT)

    def finish(self) -> None:
        try:
            out, err = self.cli.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            self.cli.kill()
            raise AssertionError(f"{self.step}: the command hangs") from None
        assert b"Traceback" not in out + err, (out + err).decode()

    def look(self, end: str) -> str:
        """It is where `resume` said, whole, and nowhere else."""
        a, b, session = self.world.a, self.world.b, self.one.session
        self.end = end
        there = Witness(b, self.one.name, session)
        if self.end == "parked":
            assert self.world.where(session) == []
            a.cm_json("restore", session, "--wait", "30s")
            self.one.assert_counts()
        elif self.end == "on_source":
            self.one.assert_counts()
            assert self.world.where(session) == ["host-a"]
        elif self.end == "on_target" and not b.pids(session):
            # It ran there already when that host died: what was handed over is what there is of it.
            a.cm_json("restore", session, "--wait", "30s")
            self.one.assert_counts()
            self.end = ARRIVED
        elif self.end == "on_target":
            there.assert_counts()
            assert self.world.where(session) == ["host-b"]
        else:
            assert self.world.where(session) == [] and self.one.record()["phase"] == "exited"
        for host in (a, b):
            cgroup.kill(host.group(session))
        return self.end


def restorers(session: str) -> list[psutil.Process]:
    """The commands that bring it back."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "restore" in (words := one.cmdline()) and session in words:
                found.append(one)
    return found


def kill(*pids: int, by: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, by)


def machine_dies(host: Host, sessions: list[str]) -> None:
    """Kill every process of this host simultaneously: stopped first, so that a holder that is still to be killed
    does not see its session die, and say so."""
    own = f"CMDOP_MIGRATE_STATE_DIR={host.state}".encode()
    pids = []
    for pid in processes():
        with contextlib.suppress(OSError):
            if own in Path(f"/proc/{pid}/environ").read_bytes() or any(str(host.state) in f for f in open_files(pid)):
                pids.append(pid)
    kill(*pids, by=signal.SIGSTOP)
    kill(*[pid for session in sessions for pid in host.pids(session)], *pids)


@contextlib.contextmanager
def cells(world: World, victim: str) -> Iterator[list[Cell]]:
    made: list[Cell] = []
    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda step: Cell.begin(world, step, made), sample(list(STEPS), SAMPLE, victim)))
        yield sorted(made, key=lambda cell: list(STEPS).index(cell.step))
    finally:
        for cell in made:
            cell.go_on()
            cell.cli.kill()
            cell.cli.communicate()


def run(world: World, strike: Callable[[list[Cell]], None], victim: str, allowed: Callable[[str], set[str]]) -> None:
    """Call `strike`, which kills or cuts its victim and lets the other processes continue."""
    with cells(world, victim) as made:
        strike(made)
        for cell in made:
            cell.finish()
        ends = settled(world.a)
        rows = [("step", "killed", "ended")]
        for cell in made:
            rows.append((cell.step, victim, cell.look(ends[cell.one.session])))
    show(f"migrate, {victim} killed at every step", rows, print)
    assert not (wrong := [row for row in rows[1:] if row[2] not in allowed(row[0])]), wrong
    world.a.assert_clean(ended=True)
    world.b.sessions()  # clears up what killed commands have left
    assert not (world.b.state / "ahead").exists() or not os.listdir(world.b.state / "ahead")


def settled(host: Host) -> dict[str, str]:
    """`resume`, until it knows of all -> where each is."""

    def ask() -> bool:
        done = host.cm("--json", "resume", timeout=120)
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        assert done.returncode in (0, 4, 6, 10, 11), done.stdout
        return done.returncode == 0

    until(ask, 90, "resume knows where each is")
    moves = [json.loads(one.read_text()) for one in (host.state / "migrations").glob("*.json")]
    assert all(one["end"] and one["told"] for one in moves), moves
    (found,) = host.cm_json("resume", moves[0]["id"])["migrations"]
    assert found["ended"] == moves[0]["end"]  # and says it again to who asks
    return {one["session"]: one["end"] for one in moves}


LIVES = {"on_source", "on_target", "parked"}
ARRIVED = "on_target, died with it; restored"


def lives(step: str) -> set[str]:
    return LIVES


def dies_with(victim: str) -> Callable[[str], set[str]]:
    order = list(STEPS)
    return lambda step: {"exited"} if order.index(step) < order.index(CAPTURED_FROM[victim]) else LIVES


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with two(tmp_path, ttl=TTL) as made:
        yield made


def go_on(made: list[Cell]) -> None:
    for cell in made:
        cell.go_on()


def test_command_killed_at_every_step(world: World) -> None:
    def strike(made: list[Cell]) -> None:
        kill(*[cell.cli.pid for cell in made])
        go_on(made)

    run(world, strike, "the command", lives)


def test_source_agent_killed_at_every_step(world: World) -> None:
    def strike(made: list[Cell]) -> None:
        world.a.kill_agent()
        go_on(made)

    run(world, strike, "host-a's agent", lives)


def test_target_agent_killed_at_every_step(world: World) -> None:
    def strike(made: list[Cell]) -> None:
        world.b.kill_agent()
        go_on(made)

    run(world, strike, "host-b's agent", lives)


def test_holder_killed_at_every_step(world: World) -> None:
    def strike(made: list[Cell]) -> None:
        kill(*[world.a.holder(cell.one.session) for cell in made])
        go_on(made)

    run(world, strike, "the holder", dies_with("the holder"))


def test_connection_cut_at_every_step(world: World) -> None:
    def strike(made: list[Cell]) -> None:
        world.sshd.hang_up()
        go_on(made)

    run(world, strike, "the SSH connection", lives)


def test_restore_on_the_target_killed_at_every_step(world: World) -> None:
    def strike(made: list[Cell]) -> None:
        kill(*[one.pid for cell in made for one in restorers(cell.one.session)])
        go_on(made)

    run(world, strike, "the restore on host-b", lives)


def test_source_host_killed_at_every_step(world: World) -> None:
    def strike(made: list[Cell]) -> None:
        machine_dies(world.a, [cell.one.session for cell in made])
        go_on(made)

    run(world, strike, "host-a", dies_with("host-a"))


def test_target_host_killed_at_every_step(world: World) -> None:
    def strike(made: list[Cell]) -> None:
        world.sshd.stop()
        machine_dies(world.b, [cell.one.session for cell in made])
        go_on(made)
        for cell in made:
            cell.finish()
        world.sshd.start()
        world.b.sessions()

    run(world, strike, "host-b", lambda step: LIVES | ({ARRIVED} if step == "forget" else set()))


@pytest.mark.parametrize("victim", ["the S3 server", "the lease store"])
def test_store_or_lease_store_lost_at_every_step(tmp_path: Path, victim: str) -> None:
    with seaweed(tmp_path) as s3, etcd(tmp_path / "etcd") as leases:
        places = {"CMDOP_MIGRATE_STORE": s3.url(s3.new_bucket()), "CMDOP_MIGRATE_LEASE": leases.url("l")}

        def strike(made: list[Cell]) -> None:
            service = s3 if victim == "the S3 server" else leases.members[0]
            service.stop()
            go_on(made)
            time.sleep(6)  # more than a TTL
            service.start()

        with two(tmp_path, ttl=TTL, environ=places | s3.environ()) as world:
            run(world, strike, victim, lives)
