"""A store that is unreachable, full, forbidden, slow or cut: exit 6 with a hint, and the session keeps running."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.witness import LARGE, Witness, family, finished, stopped
from tests.support.disk import fill, tmpfs
from tests.support.faulty_proxy import Proxy
from tests.support.host import Host, open_files, processes, until
from tests.support.servers import S3Server, free_ports, seaweed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with seaweed(tmp_path_factory.mktemp("s3")) as one:
        yield one


def use(host: Host, server: S3Server, url: str) -> None:
    host.extra |= server.environ() | {"CMDOP_MIGRATE_STORE": url}


def refused(one: Witness, code: str, *words: str) -> None:
    """The checkpoint fails with exit 6; the session was not harmed, and hardly noticed."""
    error = one.host.cm("--json", "checkpoint", one.name, timeout=120)
    said = error.stdout.decode()
    assert error.returncode == 6 and f'"{code}"' in said, error
    assert all(word in said for word in words), said
    assert '"hint": ""' not in said
    one.assert_runs()


def test_store_down_missing_or_denied(host: Host, server: S3Server) -> None:
    one = Witness.start(host)
    bucket = server.new_bucket()
    (port,) = free_ports(1)
    use(host, server, server.url(bucket, endpoint=f"http://127.0.0.1:{port}"))
    refused(one, "store_unreachable", "endpoint")
    use(host, server, server.url("no-such-bucket-here"))
    refused(one, "store_denied", "no-such-bucket-here")
    use(host, server, server.url(bucket))
    host.extra |= {"AWS_SECRET_ACCESS_KEY": "wrong"}
    refused(one, "store_denied", "AWS_SECRET_ACCESS_KEY")
    host.extra |= server.environ() | {"AWS_ACCESS_KEY_ID": "cmdop-reader"}  # may read, must not write
    refused(one, "store_denied")
    host.extra |= server.environ()
    host.cm_json("checkpoint", one.name)
    for url, code in (
        (server.url(bucket, endpoint=f"http://127.0.0.1:{port}"), "store_unreachable"),
        (server.url("no-such-bucket-here"), "store_denied"),
    ):
        host.extra["CMDOP_MIGRATE_STORE"] = url
        done = host.cm("--json", "restore", one.name)
        assert done.returncode == 6 and code.encode() in done.stdout, done
        one.assert_parked()
    use(host, server, server.url(bucket))
    one.restore()


def test_connection_cut_during_an_upload(host: Host, server: S3Server) -> None:
    """The session resumes immediately, and the next attempt does not send again what has arrived."""
    one = Witness.start(host, size=64)
    bucket = server.new_bucket()
    with Proxy(server.port) as proxy:
        use(host, server, server.url(bucket, endpoint=proxy.endpoint))
        away = proxy.after("up", 40 << 20, then=lambda: proxy.__exit__())
        refused(one, "store_unreachable")
        assert away.is_set()
    use(host, server, server.url(bucket))
    assert host.cm_json("checkpoint", one.name)["bytes"]["new"] < 50 << 20
    one.assert_parked()
    one.restore()


def test_connection_cut_during_a_fetch(host: Host, server: S3Server) -> None:
    one = Witness.start(host, size=LARGE)
    bucket = server.new_bucket()
    use(host, server, server.url(bucket))
    host.cm_json("checkpoint", one.name)
    with Proxy(server.port) as proxy:
        use(host, server, server.url(bucket, endpoint=proxy.endpoint))
        away = proxy.after("down", 8 << 20, then=lambda: proxy.__exit__())
        done = host.cm("--json", "restore", one.name, timeout=120)
        assert done.returncode == 6 and away.is_set(), done
    one.assert_parked()
    host.assert_clean(ended=True)
    use(host, server, server.url(bucket))
    one.restore()


def test_full_or_read_only_store_directory(host: Host, tmp_path: Path) -> None:
    one = Witness.start(host, size=LARGE)
    with tmpfs(tmp_path / "disk", 24 << 20) as disk:
        host.extra["CMDOP_MIGRATE_STORE"] = f"file://{disk}/store"
        refused(one, "store_denied", "prune")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        refused(one, "store_denied")
    del host.extra["CMDOP_MIGRATE_STORE"]
    host.cm_json("checkpoint", one.name)
    one.restore()


def test_slow_store_does_not_lengthen_the_freeze(host: Host, server: S3Server) -> None:
    one = Witness.start(host, size=LARGE)
    use(host, server, server.url(server.new_bucket()))
    fast = host.cm_json("checkpoint", one.name, "--leave-running")
    with Proxy(server.port) as proxy:
        proxy.rate = 12 << 20
        use(host, server, server.url(server.new_bucket(), endpoint=proxy.endpoint))
        slow = host.cm_json("checkpoint", one.name, "--leave-running")
    assert slow["bytes"]["new"] > LARGE << 20
    assert slow["phases"]["upload"] > 2 * slow["frozen_s"], slow
    assert slow["frozen_s"] < 3 * fast["frozen_s"] + 0.5, (fast, slow)
    one.assert_runs()


@pytest.mark.parametrize("step", ["criu", "upload"])
def test_ctrl_c_does_not_wait_for_a_hanging_store(host: Host, server: S3Server, step: str) -> None:
    one = Witness.start(host)
    use(host, server, server.url(server.new_bucket()))
    with stopped(host, step, "checkpoint", one.name) as (cli, _), server.frozen():
        cli.send_signal(signal.SIGCONT)
        time.sleep(1)  # long enough to have asked something
        cli.send_signal(signal.SIGINT)
        assert cli.wait(timeout=20) == 130  # its own patience with a store is a minute and more
        one.assert_runs()
    host.cm_json("checkpoint", one.name)
    one.restore()


def test_command_killed_during_a_hanging_store_leaves_nothing(host: Host, server: S3Server) -> None:
    """CRIU has looked at the kernel, not at the session: it goes, and nothing was frozen."""
    one = Witness.start(host)
    use(host, server, server.url(server.new_bucket()))
    with stopped(host, "criu", "checkpoint", one.name) as (cli, _), server.frozen():
        cli.send_signal(signal.SIGCONT)
        workers = until(lambda: [child for child in family(cli.pid) if "swrk" in child.cmdline()], 20, "CRIU waits")
        one.assert_runs()
        cli.kill()
        cli.wait(timeout=20)
        until(lambda: not any(worker.is_running() for worker in workers), 20, "CRIU is gone")
        one.assert_runs()
    host.cm_json("checkpoint", one.name)
    one.assert_parked()
    host.assert_clean(ended=True)
    one.restore()


def test_small_disk_is_refused_before_the_freeze(host: Host) -> None:
    host.state.mkdir()
    with tmpfs(host.state, 96 << 20), contextlib.closing(host):
        one = Witness.start(host, size=64)
        before = host.events()
        error = host.fails("checkpoint", one.name, status=4, code="blocked")
        assert "not enough disk" in error["message"] and "needed" in error["message"]
        assert host.events() == before
        one.assert_runs()
        host.cm_json("kill", one.name, "--signal", "KILL")


def test_disk_that_fills_during_the_checkpoint_thaws_the_session_and_leaves_nothing(host: Host) -> None:
    """Another program takes the space that was free at the check."""
    host.state.mkdir()
    with tmpfs(host.state, 220 << 20), contextlib.closing(host):
        one = Witness.start(host, size=64)
        with stopped(host, "dump", "checkpoint", one.name) as (cli, _), (host.state / "ballast").open("wb") as ballast:
            room = shutil.disk_usage(host.state).free
            os.posix_fallocate(ballast.fileno(), 0, room - (12 << 20))
            cli.send_signal(signal.SIGCONT)
            status, answer = finished(cli)
        assert status in (4, 6), answer
        one.assert_runs()
        (host.state / "ballast").unlink()
        host.cm_json("kill", one.name, "--signal", "KILL")


def crowd(host: Host) -> Path:
    """Its disk is full, and the last page of its events as well: not one more is written. -> what takes up the room."""
    events = host.state / "events.jsonl"
    with events.open("a") as file:
        file.write("x" * (4095 - events.stat().st_size % 4096) + "\n")
    assert events.stat().st_size % 4096 == 0
    return fill(host.state)


def test_disk_full_after_the_thaw_is_no_failure(host: Host, tmp_path: Path) -> None:
    host.state.mkdir()
    host.extra["CMDOP_MIGRATE_STORE"] = f"file://{tmp_path}/store"
    with tmpfs(host.state, 220 << 20), contextlib.closing(host):
        one = Witness.start(host)
        host.cm_json("checkpoint", one.name)
        with stopped(host, "hooks", "restore", one.name) as (cli, worker):
            ballast = crowd(host)
            worker.send_signal(signal.SIGCONT)
            status, answer = finished(cli)
        assert status == 0 and answer["session"] == one.session, answer
        one.assert_runs()
        ballast.unlink()
        host.cm_json("kill", one.name, "--signal", "KILL")


def test_disk_full_after_the_commit_is_no_failure(host: Host, tmp_path: Path) -> None:
    """What cannot be put on record is true all the same, and put on record when there is room."""
    host.state.mkdir()
    host.extra["CMDOP_MIGRATE_STORE"] = f"file://{tmp_path}/store"
    host.extra["CMDOP_MIGRATE_LEASE"] = f"sqlite://{tmp_path}/lease.db"
    with tmpfs(host.state, 220 << 20), contextlib.closing(host):
        one = Witness.start(host)
        with stopped(host, "park", "checkpoint", one.name) as (cli, _):
            ballast = crowd(host)
            cli.send_signal(signal.SIGCONT)
            status, answer = finished(cli)
        assert status == 0 and answer["session"] == one.session, answer
        ballast.unlink()
        until(lambda: one.state == "parked", 10, "the agent has asked its lease")
        one.restore()
        host.cm_json("kill", one.name, "--signal", "KILL")


def test_refused_restore_removes_nothing_of_an_ended_session(host: Host, tmp_path: Path) -> None:
    """What it changed since its last checkpoint is here alone, until that one is back."""
    host.state.mkdir()
    host.extra["CMDOP_MIGRATE_STORE"] = f"file://{tmp_path}/store"
    with tmpfs(host.state, 220 << 20), contextlib.closing(host):
        one = Witness.start(host, size=64)
        host.cm_json("checkpoint", one.name, "--leave-running")
        os.kill(host.holder(one.session), signal.SIGKILL)
        until(lambda: one.state == "exited", 10, "it is over")
        precious = host.state / "sessions" / one.session / "layers/0/upper/precious"
        precious.write_text("of two hours")
        with (host.state / "ballast").open("wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, 160 << 20)
        host.fails("restore", one.name, status=4, code="blocked")
        assert precious.read_text() == "of two hours"
        assert "/precious" in [file["path"] for file in host.cm_json("show", one.name)["files"]]
        (host.state / "ballast").unlink()
        one.host.cm_json("restore", one.session)
        one.assert_counts()
        assert not precious.exists()
        host.cm_json("kill", one.name, "--signal", "KILL")


def test_restore_on_a_full_disk_is_refused_and_leaves_it_parked(host: Host, tmp_path: Path) -> None:
    host.state.mkdir()
    host.extra["CMDOP_MIGRATE_STORE"] = f"file://{tmp_path}/store"
    with tmpfs(host.state, 220 << 20), contextlib.closing(host):
        one = Witness.start(host, size=64)
        host.cm_json("checkpoint", one.name)
        with (host.state / "ballast").open("wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, 160 << 20)
        error = host.fails("restore", one.name, status=4, code="blocked")
        assert "not enough disk" in error["message"]
        one.assert_parked()
        host.assert_clean(ended=True)
        (host.state / "ballast").unlink()
        one.restore()
        host.cm_json("kill", one.name, "--signal", "KILL")


def test_more_memory_than_dev_shm_can_hold(host: Host) -> None:
    """Nothing of ours goes there."""
    small = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    one = Witness.start(host, size=LARGE)
    host.prefix = ("unshare", "--mount", "sh", "-c", small, "sh")
    host.cm_json("checkpoint", one.name)
    one.restore()
    host.prefix = ()


def test_lazy_restore_reports_a_stalled_store_and_resumes_when_it_is_back(host: Host, server: S3Server) -> None:
    one = Witness.start(host, size=64)
    bucket = server.new_bucket()
    use(host, server, server.url(bucket))
    done = host.cm_json("checkpoint", one.name)["checkpoint"]
    before = len(one.numbers())
    with Proxy(server.port) as proxy:
        proxy.rate = 6 << 20
        use(host, server, server.url(bucket, endpoint=proxy.endpoint))
        assert host.cm_json("restore", one.name, "--lazy")["token"] == 2
        proxy.block()
        use(host, server, server.url(bucket))
        error = host.fails("checkpoint", one.name, status=4, code="blocked")
        assert "restored" in error["message"]
        pruned = host.cm_json("checkpoints", "prune", "--keep-within", "0.001s")
        assert pruned["checkpoints"] == [], "its memory is still there"
        stalled = until(lambda: memory_events(one)[:1], 60, "an event")
        assert stalled == ["memory_stalled"]
        (row,) = host.sessions()
        assert row["state"] == "running" and "waits for the store" in row["note"], row
        assert "waits for the store" in host.ok("show", one.name)
        proxy.rate = 0
        proxy.unblock()
        until(lambda: memory_events(one)[-1:] == ["memory_complete"], 60, "all memory is there")
        assert memory_events(one) == ["memory_stalled", "memory_going_on", "memory_complete"]
    until(lambda: not (host.state / "sessions" / one.session / "image").exists(), 10, "the copy goes")
    assert host.sessions()[0]["note"] == ""
    assert one.assert_runs() > before
    assert host.cm_json("checkpoints", "prune", "--keep-within", "0.001s")["checkpoints"] == [], "its lease names it"
    host.ok("kill", one.name)
    until(lambda: host.cm_json("checkpoints", "prune", "--keep-within", "0.001s")["checkpoints"] == [done], 20)


def memory_events(one: Witness) -> list[str]:
    return [event["event"] for event in one.host.events(one.session) if event["event"].startswith("memory")]


def test_lazy_restore_process_killed_during_a_stall_parks_the_session(host: Host, server: S3Server) -> None:
    one = Witness.start(host, size=64)
    bucket = server.new_bucket()
    use(host, server, server.url(bucket))
    host.cm_json("checkpoint", one.name)
    with Proxy(server.port) as proxy:
        proxy.rate = 6 << 20
        use(host, server, server.url(bucket, endpoint=proxy.endpoint))
        host.cm_json("restore", one.name, "--lazy")
        proxy.block()
        chunks = str(host.state / "sessions" / one.session / "image" / "chunks")
        (worker,) = [pid for pid in processes() if chunks in open_files(pid)]
        os.kill(worker, signal.SIGKILL)
        until(lambda: one.record()["phase"] == "parked", 10, "it is parked again")
    assert host.events(one.session)[-1]["reason"] == "its memory could not be restored completely"
    one.assert_parked()
    host.assert_clean(ended=True)
    use(host, server, server.url(bucket))
    assert one.restore()["token"] == 3
