"""A park is proven by a trial restore: the trial never runs, leaves nothing, and decides whether the session ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from pathlib import Path

import psutil
import pytest

from cmdop_migrate.drain import schedule
from cmdop_migrate.holder import cgroup
from cmdop_migrate.model import Record
from cmdop_migrate.snapshot import proof
from tests.crash.witness import LARGE, Witness, finished, gone, stopped
from tests.support.host import Host, until

AT_FIRST_INSTRUCTION = "prove:complete"


def trial_of(host: Host, session: str) -> str:
    """The identity of the trial that is under way."""
    (found,) = set(host.session_dirs()) - {session}
    return found


def tasks(host: Host, trial: str) -> list[psutil.Process]:
    """Return the trial's own processes, without CRIU. A process that ends meanwhile is left out."""
    own = []
    for pid in host.pids(trial):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if "criu" not in " ".join(process.cmdline()):
                own.append(process)
    return own


def test_trial_is_complete_frozen_and_isolated_while_the_session_is_frozen(host: Host, tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    one = Witness.start(host, size=LARGE, options=("--share", str(share)))
    with stopped(host, AT_FIRST_INSTRUCTION, "checkpoint", one.name) as (cli, _):
        trial = trial_of(host, one.session)
        assert cgroup.is_frozen(host.group(one.session))
        made, originals = tasks(host, trial), [psutil.Process(pid) for pid in host.pids(one.session)]
        assert sorted(task.name() for task in made) == sorted(task.name() for task in originals)
        assert host.sessions()[0]["session"] == one.session and len(host.sessions()) == 1
        inner = [task for task in made if task.name() != "tini-static"]
        assert all(task.status() in (psutil.STATUS_TRACING_STOP, psutil.STATUS_STOPPED) for task in made), made
        network = {os.readlink(f"/proc/{task.pid}/ns/net") for task in (*inner, *originals)}
        assert len(network) == 2
        cli.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 0 and answer["proved"] is True and answer["skipped"] is None and answer["phases"]["prove"] > 0
    assert [one["proved"] for one in host.events(one.session) if one["event"] == "checkpointed"] == [True]
    one.assert_parked()
    host.assert_clean(ended=True)
    one.restore()


def test_criu_killed_at_the_first_instruction_does_not_let_the_trial_run(host: Host) -> None:
    """A process whose tracer dies would run; the trial's cgroup is frozen by then, and its init dies with CRIU."""
    one = Witness.start(host)
    with stopped(host, AT_FIRST_INSTRUCTION, "checkpoint", one.name) as (cli, _):
        trial = trial_of(host, one.session)
        (criu,) = {psutil.Process(pid) for pid in host.pids(trial)} - set(tasks(host, trial))
        used = cgroup.cpu_seconds(host.group(trial))
        gone(criu)
        until(lambda: not tasks(host, trial) or cgroup.is_frozen(host.group(trial)), 5, "the trial does not run")
        assert cgroup.cpu_seconds(host.group(trial)) - used < 0.02  # what it takes to die
        cli.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 0 and answer["proved"], "the tree was complete when CRIU was killed"
    one.assert_parked()
    host.assert_clean(ended=True)
    one.restore()


def test_trial_that_fails_leaves_the_session_running_and_publishes_nothing(host: Host) -> None:
    one = Witness.start(host)
    with stopped(host, "prove", "checkpoint", one.name) as (cli, _):
        packs = [path for path in (host.state / "store").rglob("*") if path.is_file() and "packs" in str(path)]
        assert packs
        for pack in packs:
            pack.write_bytes(bytes(pack.stat().st_size))
        cli.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert (status, answer["error"]["code"]) == (8, "criu_failed"), answer
    assert "trial restore" in answer["error"]["message"] and "keeps running" in answer["error"]["hint"]
    assert [event["event"] for event in host.events(one.session)].count("proof_failed") == 1
    one.assert_runs()
    assert host.cm_json("checkpoints", "ls")["checkpoints"] == []
    host.fails("restore", one.name, status=3, code="checkpoint_not_found")
    assert host.session_dirs() == [one.session]
    shutil.rmtree(host.state / "store")
    host.cm_json("checkpoint", one.name)
    one.restore()


@pytest.mark.parametrize("also_holder", [False, True])
def test_command_killed_during_the_trial_leaves_the_session_running_and_no_trial(host: Host, also_holder: bool) -> None:
    """If the trial's own holder is killed as well, the next command's sweep ends what is left."""
    one = Witness.start(host)
    with stopped(host, AT_FIRST_INSTRUCTION, "checkpoint", one.name) as (cli, _):
        trial = trial_of(host, one.session)
        victims: list[psutil.Process] = [psutil.Process(host.holder(trial))] if also_holder else []
        for victim in victims:
            gone(victim)
        gone(cli)
    one.assert_runs()
    until(lambda: host.cm("ls") and trial not in host.session_dirs(), 10, "the trial's directory is removed")
    assert not os.path.exists(host.group(trial))
    host.cm_json("checkpoint", one.name)
    one.restore()


def test_no_prove_and_deadline_skip_the_trial_and_say_so(host: Host) -> None:
    one = Witness.start(host)
    saved = host.cm_json("checkpoint", one.name, "--no-prove")
    assert (saved["proved"], "prove" in saved["phases"]) == (False, False) and saved["skipped"]
    one.restore()
    said = host.ok("checkpoint", one.name, "--deadline", "0.1s")
    assert "not proven" in said and "until the deadline" in said
    one.restore()
    assert host.cm_json("checkpoint", one.name, "--leave-running")["proved"] is False
    assert "restored on trial in" in host.ok("checkpoint", one.name, "--deadline", "10m")
    one.restore()


def test_session_on_the_hosts_network_is_proven_while_it_keeps_its_ports(host: Host) -> None:
    listener = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print('port', s.getsockname()[1], flush=True); time.sleep(1000)"
    facts = host.start("python3", "-c", listener, name="net", options=("--net", "host"))
    port = int(host.wait_for("net", r"port \d+")["matched"].split()[1])
    assert host.cm_json("checkpoint", "net")["proved"] is True
    host.cm_json("restore", "net")
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        assert host.pids(facts["session"])
    host.ok("kill", "net")


def test_socket_and_deleted_file_in_a_shared_directory_survive_a_trial(host: Host, tmp_path: Path) -> None:
    """CRIU binds sockets anew and makes deleted files again: in the trial not in the directory that is shared."""
    share = tmp_path / "share"
    share.mkdir()
    program = (
        f"import os, socket, time; os.chdir({str(share)!r}); s = socket.socket(socket.AF_UNIX); s.bind('sock'); s.listen()\n"
        "f = open('gone', 'w+'); f.write('kept'); f.flush(); os.unlink('gone'); print('rea' + 'dy', flush=True)\n"
        "while True:\n    c, _ = s.accept(); f.seek(0); c.send(f.read().encode()); c.close()"
    )
    host.start("python3", "-u", "-c", program, name="shared", options=("--share", str(share)))
    host.wait_for("shared", "ready")
    before = os.stat(share / "sock").st_ino
    with stopped(host, AT_FIRST_INSTRUCTION, "checkpoint", "shared") as (cli, _):
        assert os.listdir(share) == ["sock"] and os.stat(share / "sock").st_ino == before
        gone(cli)
    until(lambda: host.sessions()[0]["state"] == "running", 10, "the session resumes")
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(share / "sock"))
        assert client.recv(16) == b"kept"
    assert host.cm_json("checkpoint", "shared")["proved"] is True
    host.cm_json("restore", "shared")
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(share / "sock"))
        assert client.recv(16) == b"kept"
    host.ok("kill", "shared")


def test_reasons_to_skip_a_trial() -> None:
    record = Record.__new__(Record)
    object.__setattr__(record, "binds", ())
    assert proof.skip_reason(record, 10, 1 << 20, None, 1 << 40) is None
    assert "deadline" in str(proof.skip_reason(record, 10, 1 << 20, 0.0, 1 << 40))
    assert "room" in str(proof.skip_reason(record, 10, 1 << 30, None, 1 << 20))


def test_drain_gives_each_park_its_share_of_the_spare_time() -> None:
    load = schedule.Load("s", "s", 1, 1, 1, 1.0)
    parks = [schedule.Planned(load, "park", 0.0, 2.0), schedule.Planned(load, "park", 0.0, 4.0)]
    assert schedule.proof_deadline(parks[0], parks, 10.0) == 5.0
    assert schedule.proof_deadline(parks[0], [*parks, schedule.Planned(load, "leave", 0.0, 9.0)], 10.0) == 2.0
