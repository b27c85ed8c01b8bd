"""A session that runs while its memory is still in the store, and what may befall it until all of it is here."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate.holder import cgroup
from tests.crash.witness import Witness, stopped
from tests.support.disk import fill, tmpfs
from tests.support.faulty_proxy import Proxy
from tests.support.host import Host, open_files, processes, until
from tests.support.patience import bound
from tests.support.servers import S3Server, seaweed

SLOW = 6 << 20  # bytes a second


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with seaweed(tmp_path_factory.mktemp("s3")) as one:
        yield one


def parked(host: Host, server: S3Server, bucket: str) -> tuple[Witness, str]:
    """A session of 64 MiB in the bucket, and its checkpoint."""
    host.extra |= server.environ() | {"CMDOP_MIGRATE_STORE": server.url(bucket)}
    one = Witness.start(host, size=64)
    return one, host.cm_json("checkpoint", one.name)["checkpoint"]


def through(host: Host, server: S3Server, bucket: str, proxy: Proxy) -> None:
    proxy.rate = SLOW
    host.extra["CMDOP_MIGRATE_STORE"] = server.url(bucket, endpoint=proxy.endpoint)


def worker(one: Witness) -> list[int]:
    """Who brings its memory."""
    chunks = str(one.host.state / "sessions" / one.session / "image" / "chunks")
    return [pid for pid in processes() if chunks in open_files(pid)]


def memory_events(one: Witness) -> list[str]:
    return [event["event"] for event in one.host.events(one.session) if event["event"].startswith("memory")]


def complete(one: Witness) -> None:
    until(lambda: memory_events(one)[-1:] == ["memory_complete"], 60, "all memory is there")
    one.assert_runs()


def test_kill_during_a_stalled_store_is_immediate(host: Host, server: S3Server) -> None:
    """The kill does not wait for memory that is not needed any more."""
    bucket = server.new_bucket()
    one, _ = parked(host, server, bucket)
    with Proxy(server.port) as proxy:
        through(host, server, bucket, proxy)
        host.cm_json("restore", one.name, "--lazy")
        proxy.block()
        until(lambda: memory_events(one) == ["memory_stalled"], 60, "it is stalled")
        began = time.monotonic()
        host.cm_json("kill", one.name, "--grace", "1s")
        assert time.monotonic() - began < bound(8)
        until(lambda: not worker(one), 10, "the process that fetched its memory is gone")
    host.assert_clean(ended=True)


def test_prune_refuses_the_checkpoint_a_lazy_restore_reads(host: Host, server: S3Server) -> None:
    bucket = server.new_bucket()
    one, saved = parked(host, server, bucket)
    with Proxy(server.port) as proxy:
        through(host, server, bucket, proxy)
        host.cm_json("restore", one.name, "--lazy")
        host.extra["CMDOP_MIGRATE_STORE"] = server.url(bucket)
        error = host.fails("checkpoints", "prune", "--drop", saved, status=5, code="fenced")
        assert "memory" in error["message"] and one.name in error["message"]
        proxy.rate = 0
        complete(one)
    assert host.cm_json("checkpoints", "prune", "--drop", saved)["checkpoints"] == [saved]


def test_disk_that_fills_does_not_end_a_lazily_restored_session(host: Host, server: S3Server) -> None:
    """What is still to come has its room from the beginning."""
    bucket = server.new_bucket()
    host.state.mkdir()
    with tmpfs(host.state, 220 << 20), Proxy(server.port) as proxy:
        one, _ = parked(host, server, bucket)
        through(host, server, bucket, proxy)
        host.cm_json("restore", one.name, "--lazy")
        ballast = fill(host.state)
        proxy.block()  # which nothing on this disk can be told of
        time.sleep(3)
        proxy.rate = 0
        proxy.unblock()
        until(lambda: not worker(one), 60, "all memory is there")
        one.assert_counts()
        ballast.unlink()
        host.cm_json("kill", one.name, "--signal", "KILL")
        host.close()


def test_ending_the_commands_cgroup_does_not_end_the_session(host: Host, server: S3Server) -> None:
    """As a service manager does when the command of a unit is done."""
    bucket = server.new_bucket()
    one, _ = parked(host, server, bucket)
    unit = host.group("unit")
    cgroup.create(unit)
    try:
        with Proxy(server.port) as proxy:
            through(host, server, bucket, proxy)
            host.prefix = ("sh", "-c", f'echo 0 > {unit}/cgroup.procs && exec "$@"', "sh")
            host.cm_json("restore", one.name, "--lazy")
            host.prefix = ()
            assert worker(one), "its memory is still coming"
            cgroup.kill(unit)
            proxy.rate = 0
            complete(one)
    finally:
        cgroup.remove(unit)


def test_unmounted_store_stalls_a_lazy_restore(host: Host, tmp_path: Path) -> None:
    """Its disk away, a directory looks empty: that is not a pack that is gone."""
    disk, aside = tmp_path / "disk", tmp_path / "aside"
    aside.mkdir()
    with tmpfs(disk, 220 << 20):
        host.extra["CMDOP_MIGRATE_STORE"] = f"file://{disk}/store"
        one = Witness.start(host, size=64, every=1000)  # it does not read its memory before the store is gone
        host.cm_json("checkpoint", one.name)
        with stopped(host, "adopted", "restore", one.name, "--lazy") as (_, process):
            subprocess.run(["mount", "--bind", str(disk), str(aside)], check=True)
            subprocess.run(["umount", "-l", str(disk)], check=True)
            process.send_signal(signal.SIGCONT)
            try:
                until(lambda: memory_events(one), 60, "an event")
                assert memory_events(one) == ["memory_stalled"]
            finally:
                subprocess.run(["mount", "--bind", str(aside), str(disk)], check=True)
                subprocess.run(["umount", "-l", str(aside)], check=True)
            complete(one)
