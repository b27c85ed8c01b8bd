"""The lab itself: hosts that are hosts, failures that fail, and nothing left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import testinfra

from cmdop_migrate.clock import boottime
from cmdop_migrate.holder import cgroup
from scripts.lablib import place
from scripts.lablib.lab import Lab
from scripts.lablib.model import S3_PORTS, LabSpec, LabTrouble
from tests.support import fenced_sessions
from tests.support.host import PROJECT, mounts, until
from tests.support.lab_hosts import LABLIB, LabHost, TestLab, a_lab, run_lab

KINDS = ("net", "mnt", "pid", "uts", "ipc", "cgroup")


def test_hosts_over_ssh(lab3: TestLab, tmp_path: Path) -> None:
    keys = set()
    for host in lab3.hosts:
        over = testinfra.get_host(f"ssh://{host.name}", ssh_config=str(lab3.ssh_config))
        assert over.check_output("hostname && cmdop-migrate --json ls") == f'{host.name}\n{{"sessions": []}}'
        assert over.file("/etc/cmdop-migrate/config.toml").contains(f'host = "{host.name}"')
        keys.add(over.file("/etc/ssh/ssh_host_ed25519_key.pub").content_string)
    assert len(keys) == 3
    a = lab3.hosts[0]
    assert a.ssh("ssh", "-o", "BatchMode=yes", "host-b", "ssh", "-o", "BatchMode=yes", "host-c", "hostname").stdout == (
        "host-c\n"
    )
    wrong = tmp_path / "known"
    known = (lab3.directory / "ssh/known_hosts").read_text().splitlines()
    wrong.write_text(f"host-a {known[1].split(' ', 1)[1]}\n")
    argv = ["ssh", "-F", str(lab3.ssh_config), "-o", f"UserKnownHostsFile={wrong}", "-o", "BatchMode=yes", "host-a"]
    refused = subprocess.run([*argv, "true"], capture_output=True, text=True, timeout=30, check=False)
    assert refused.returncode == 255 and "Host key verification failed" in refused.stderr


def test_hosts_keep_to_themselves(lab3: TestLab) -> None:
    a, b, _ = lab3.hosts
    for folder in ("/var/lib/cmdop-migrate", "/run", "/etc", "/srv", "/usr/local/sbin", "/dev/shm"):
        a.shell(f"echo mine > {folder}/of-host-a")
        assert "of-host-a" in a.shell(f"ls {folder}")
        assert "of-host-a" not in b.shell(f"ls {folder}")
        assert not Path(folder, "of-host-a").exists()
        a.shell(f"rm {folder}/of-host-a")
    for kind in KINDS:
        found = {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in ("self", lab3.pid("host-a"), lab3.pid("host-b"))}
        assert len(found) == 3, f"{kind} is shared"
    assert "labs" not in a.shell("ls /var/lib/cmdop-migrate")
    assert a.shell("cat /proc/self/cgroup | tail -n 1").strip() == "0::/"
    machine = {name for _, name in socket.if_nameindex()}
    assert not {one for one in machine if one.startswith("p-")}


def test_a_session_goes_from_host_to_host(lab3: TestLab) -> None:
    a, b, c = lab3.hosts
    session = fenced_sessions.counter(a, "goes")
    for there, here in ((b, a), (c, b)):
        assert here.ssh("cmdop-migrate", "checkpoint", "goes").returncode == 0
        assert there.ssh("cmdop-migrate", "restore", session).returncode == 0
        fenced_sessions.counts_on(there, session)
        here.assert_clean(ended=True)
    assert fenced_sessions.lease(a, session)["holder"] == "host-c"
    c.ok("kill", session)
    c.assert_clean(ended=True)


def _answers(host: LabHost, address: str, port: int) -> bool:
    script = f"timeout 1 bash -c 'echo > /dev/tcp/{address}/{port}' 2>&1 || echo no"
    return host.shell(script) == ""


def test_cut_and_heal(lab3: TestLab) -> None:
    a, b, c = lab3.hosts
    with subprocess.Popen(
        b.lab.command("host-b", ["ssh", "-o", "BatchMode=yes", "host-a", "while echo beat; do sleep 0.05; done"]),
        stdout=subprocess.PIPE,
        text=True,
    ) as beats:
        assert beats.stdout is not None
        try:
            assert beats.stdout.readline() == "beat\n"
            lab3.cut("host-a")
            assert lab3.state("host-a") == "cut"
            os.set_blocking(beats.stdout.fileno(), False)
            time.sleep(0.3)
            _readable(beats.stdout.fileno())
            time.sleep(0.5)
            assert not _readable(beats.stdout.fileno())  # also on a connection that stood
            assert not _answers(b, a.address, 22) and not _answers(a, b.address, 22)
            assert not _answers(a, lab3.spec.node("s3").address, 8333)
            assert _answers(b, c.address, 22)
            lab3.heal("host-a")
            assert _answers(a, lab3.spec.node("s3").address, 8333) and _answers(b, a.address, 22)
            until(lambda: _readable(beats.stdout.fileno()), 20, "the connection goes on")  # type: ignore[union-attr]
        finally:
            beats.kill()
    a.shell("for each in $(pgrep -f 'while echo bea[t]'); do kill $each || :; done")


def _readable(fd: int) -> bool:
    try:
        return bool(os.read(fd, 1 << 16))
    except BlockingIOError:
        return False


def test_sudden_death_and_reboot(lab3: TestLab) -> None:
    a, b, _ = lab3.hosts
    session = fenced_sessions.counter(a, "dies")
    inside = a.pids(session)
    (a.state / "kept").write_text("on disk")
    pid = lab3.pid("host-a")
    lab3.kill("host-a")
    assert lab3.state("host-a") == "dead" and not any(place.started_at(one) for one in (pid, *inside))
    assert not os.path.exists(lab3.group("host-a"))
    with pytest.raises(LabTrouble, match=r"host-a is dead: .* start host-a"):
        lab3.exec("host-a", "true")
    assert not _answers(b, a.address, 22)
    lab3.start("host-a")
    assert a.shell("cat /var/lib/cmdop-migrate/kept; ls /run/cmdop-migrate 2>&1 || true").startswith("on disk")
    assert a.ssh("hostname").stdout == "host-a\n"  # under the key it had
    (row,) = [one for one in a.sessions() if one["session"] == session]
    assert row["state"] == "exited"


def test_asleep_and_awake(lab3: TestLab) -> None:
    _, b, _ = lab3.hosts
    session = fenced_sessions.counter(b, "naps")
    stamps = lab3.home("host-b") / "srv/stamps"
    with subprocess.Popen(
        lab3.command("host-b", ["sh", "-c", "while echo x; do sleep 0.02; done > /srv/stamps"])
    ) as own:
        try:
            until(lambda: stamps.exists() and stamps.stat().st_size, 10, "a plain process of the host works")
            lab3.pause("host-b")
            assert lab3.state("host-b") == "paused"
            # A signal that comes now wakes a process for an instant, without a step of its own: the mark flickers.
            until(lambda: cgroup.is_frozen(b.group(session)), 5, "the session stands still")
            with pytest.raises(LabTrouble, match=r"paused: .* resume host-b"):
                lab3.exec("host-b", "true")
            size = stamps.stat().st_size
            time.sleep(0.5)
            assert stamps.stat().st_size == size
            lab3.resume("host-b")
            until(lambda: stamps.stat().st_size > size, 10, "it works again")
            fenced_sessions.counts_on(b, session)
        finally:
            lab3.resume("host-b")
            end_inside(own)
    b.ok("kill", session)


def end_inside(process: subprocess.Popen[bytes]) -> None:
    """nsenter and what it started: the second in the host's own count of processes."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    process.wait(timeout=10)


class Traces:
    """All that a lab is, seen from the machine; afterwards none of it may be found."""

    def __init__(self, lab: Lab) -> None:
        self.name = lab.spec.name
        pids = [pid for group, _, _ in os.walk(place.group_of(self.name)) for pid in cgroup.pids(group)]
        self.processes = {pid: place.started_at(pid) for pid in pids}
        nodes = [lab.pid(node.name) for node in lab.spec.nodes()]
        self.at = boottime() * os.sysconf("SC_CLK_TCK")
        self.spaces = {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in nodes for kind in KINDS}

    def left(self) -> list[str]:
        found = [f"process {pid}" for pid, start in self.processes.items() if start and place.started_at(pid) == start]
        found += [f"mount {line}" for line in mounts() if f"labs/{self.name}" in line]
        found += [f"interface {name}" for _, name in socket.if_nameindex() if name.startswith("p-") or name == "br0"]
        places = (place.group_of(self.name), str(place.labs_dir() / self.name))
        found += [path for path in places if os.path.exists(path)]
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            if (place.started_at(int(pid)) or self.at) >= self.at:
                continue  # one from later: the kernel uses the numbers of namespaces again
            try:
                of = {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS}
            except OSError:
                continue
            found += [f"{one} of process {pid}" for one in of & self.spaces]
        return found


def test_two_labs_at_once_and_nothing_is_left(lab3: TestLab) -> None:
    with a_lab(hosts=1) as second:
        (host,), (other, *_) = second.hosts, lab3.hosts
        assert host.name == other.name and host.address == other.address
        ours, theirs = fenced_sessions.counter(host, "two"), fenced_sessions.counter(other, "two")
        assert {one["session"] for one in host.sessions()} == {ours}
        second.cut("host-a")
        assert other.ssh("true").returncode == 0
        second.pause("host-a")  # down takes it as it is: cut off, asleep, with a session
        traces = Traces(second)
        assert len(traces.processes) > 8
    assert traces.left() == []
    assert not list(Path("/tmp").glob(f"seaweedfs-*-grpc-{S3_PORTS[0] + 10000}.sock"))
    fenced_sessions.counts_on(other, theirs)
    other.ok("kill", theirs)


def test_what_a_killed_owner_left_is_swept(lab3: TestLab) -> None:
    """The process a lab belonged to, and one that was killed while it made one."""
    with subprocess.Popen(["sleep", "60"]) as owner:
        name = f"t{os.getpid()}-dead"
        run_lab("--name", name, "up", "1", "--lease", "s3", "--owner", str(owner.pid))
        traces = Traces(Lab.find(name))
        assert f"of process {owner.pid}" in run_lab("--name", name, "ls")
        owner.kill()
    assert "(dead)" in run_lab("--name", name, "ls")
    half = f"t{os.getpid()}-half"
    with subprocess.Popen([*LABLIB, "--name", half, "up", "2"], cwd=PROJECT, stdout=subprocess.DEVNULL) as making:
        until(lambda: (place.labs_dir() / half / "nodes/s3/pid").exists(), 30, "it has begun")
        making.kill()
    assert place.names(place.labs_dir()).count(half) == 1
    assert not (place.labs_dir() / name).exists(), "the next `up` removes it"
    assert half in place.sweep(place.labs_dir())
    assert traces.left() == [] and not os.path.exists(place.group_of(half))
    assert lab3.hosts[0].ssh("true").returncode == 0  # whose owner lives


@pytest.fixture
def own_name() -> Iterator[str]:
    name = f"t{os.getpid()}-cli"
    yield name
    place.remove(place.labs_dir(), name)


def test_as_a_person_uses_it(own_name: str) -> None:
    lab = ("--name", own_name)
    said = run_lab(*lab, "up", "2", "--ttl", "5s")
    assert "s3, etcd-1, host-a, host-b" in said and "ssh -F " in said
    assert "already" in run_lab(*lab, "up", "2", status=1)
    assert run_lab(*lab, "exec", "host-b", "hostname") == "host-b\n"
    assert run_lab(*lab, "ssh", "host-b", "hostname") == "host-b\n"
    run_lab(*lab, "exec", "host-a", "sh", "-c", "exit 7", status=7)
    assert 'lease_ttl = "5s"' in run_lab(*lab, "exec", "host-a", "cat", "/etc/cmdop-migrate/config.toml")
    for verb, state in (
        ("cut", "cut"),
        ("heal", "running"),
        ("pause", "paused"),
        ("resume", "running"),
        ("kill", "dead"),
    ):
        run_lab(*lab, verb, "host-b")
        assert f"host-b    10.99.0.12   {state}\n" in run_lab(*lab, "ls")
    assert "start host-b" in run_lab(*lab, "cut", "host-b", status=1)
    run_lab(*lab, "start", "host-b")
    run_lab(*lab, "kill", "s3")
    run_lab(*lab, "start", "s3")
    assert "no 'host-x' in the lab" in run_lab(*lab, "cut", "host-x", status=1)
    assert "use down" in run_lab(*lab, "kill", "switch", status=1)
    run_lab(*lab, "down")
    assert "up 3" in run_lab(*lab, "down", status=1)
    assert own_name not in run_lab("ls")


@pytest.mark.parametrize("hosts", ["0", "27", "x"])
def test_bad_numbers(own_name: str, hosts: str) -> None:
    said = run_lab("--name", own_name, "up", hosts, status=2 if hosts == "x" else 1)
    assert "Traceback" not in said and not (place.labs_dir() / own_name).exists()


def test_bad_names() -> None:
    for name in ("", "A", "../up", "a" * 40, "-x"):
        with pytest.raises(LabTrouble):
            LabSpec(name, 1)


@pytest.mark.skipif(not (PROJECT / ".venv/bin/python").exists(), reason="scripts/setup makes .venv")
def test_the_script_itself() -> None:
    done = subprocess.run([PROJECT / "scripts/lab", "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "scripts/lab up 3" in done.stdout
