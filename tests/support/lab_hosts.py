"""Run labs for tests (scripts/lab), and give their hosts the interface of tests/support/host.py.

with a_lab(hosts=2, lease="s3", ttl="3s") as lab:
    a, b = lab.hosts
    a.start("sleep", "100", name="t")       # over the console; a.ssh("…") goes over the network
    lab.cut("host-a"); lab.heal("host-a"); lab.kill("host-b"); lab.start("host-b"); lab.pause("s3")
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cmdop_migrate.config import DEFAULT_STATE_DIR
from cmdop_migrate.holder import cgroup
from scripts.lablib.lab import Lab
from tests.support.host import PROJECT, Host

RUN_DIR = "/run/cmdop-migrate"
LABLIB = [sys.executable, "-m", "scripts.lablib"]
_numbers = itertools.count(1)


@dataclass
class LabHost(Host):
    """Drive a host of a lab from outside: `cm` is its console, `ssh` its network."""

    lab: Lab = field(kw_only=True)
    subnet: str = "100.64.0.0/10"

    @property
    def state(self) -> Path:
        return self.lab.home(self.name) / "state"

    @property
    def run(self) -> Path:
        return Path(f"/proc/{self.lab.pid(self.name)}/root{RUN_DIR}")

    @property
    def paths(self) -> tuple[str, str]:
        return DEFAULT_STATE_DIR, RUN_DIR

    @property
    def address(self) -> str:
        return self.lab.spec.node(self.name).address

    def argv(self, *args: str, env: dict[str, str] | None = None) -> list[str]:
        pairs = [f"{key}={value}" for key, value in {**self.extra, **(env or {})}.items()]
        return self.lab.command(self.name, ["env", *pairs, "cmdop-migrate", *args])

    def shell(self, script: str, timeout: float = 60) -> str:
        """Run a shell command on the console of the host; it must succeed."""
        done = self.lab.exec(self.name, "sh", "-c", script, timeout=timeout)
        assert done.returncode == 0, f"{script}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def ssh(self, *command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command over the lab's network, with its key and known hosts."""
        argv = ["ssh", "-F", str(self.lab.ssh_config), "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", self.name]
        return subprocess.run(
            [*argv, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )

    def group(self, session: str = "") -> str:
        host_id = (self.state / "host-id").read_text()
        return cgroup.path_of(self.lab.group(self.name), host_id, session).rstrip("/")

    def processes(self) -> list[int]:
        """Return its processes without init and sshd, whose log lies in the directory of the lab."""
        found = [pid for group, _, _ in os.walk(self.lab.group(self.name)) for pid in cgroup.pids(group)]
        return [pid for pid in found if _name_of(pid) not in ("tini-static", "sshd", "")]

    def stopped(self) -> list[int]:
        """Return its processes that a signal has stopped."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                    found.append(pid)
        return found

    def session_mounts(self) -> list[str]:
        lines = Path(f"/proc/{self.lab.pid(self.name)}/mountinfo").read_text(errors="replace").splitlines()
        return [line.split()[4] for line in lines if f" {DEFAULT_STATE_DIR}/sessions" in line]

    def session_links(self) -> set[str]:
        names = os.listdir(f"/proc/{self.lab.pid(self.name)}/root/sys/class/net")
        return {name for name in names if name.startswith("cmdop")}

    def close(self) -> None:
        """Do nothing: the host ends with its lab."""


@dataclass(frozen=True)
class TestLab(Lab):
    """Drive a lab as tests need it."""

    __test__ = False

    @property
    def hosts(self) -> tuple[LabHost, ...]:
        return tuple(self.host(node.name) for node in self.spec.of_kind("host"))

    def host(self, name: str) -> LabHost:
        return LabHost(self.home(name), name=name, ttl=self.spec.ttl, lab=self)

    def start(self, name: str, wait: bool = True) -> None:
        """Start the lab by its command, in a separate process: it forks, and a test may have threads."""
        run_lab("--name", self.spec.name, "start", name)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to its first process."""
        os.kill(self.pid(name), number)


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def run_lab(*args: str, timeout: float = 90, status: int = 0) -> str:
    """Run the Python part of `scripts/lab`; return all that it prints."""
    done = subprocess.run(
        [*LABLIB, *args],
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == status, f"{args}: exit {done.returncode}\n{done.stdout}"
    return done.stdout


@contextlib.contextmanager
def a_lab(hosts: int = 2, lease: str = "etcd", ttl: str = "3s") -> Iterator[TestLab]:
    """Run a lab for the length of the block. If this process is killed, the next lab of this machine removes it."""
    name = f"t{os.getpid()}-{next(_numbers)}"
    run_lab("--name", name, "up", str(hosts), "--lease", lease, "--ttl", ttl, "--owner", str(os.getpid()))
    found = Lab.find(name)
    lab = TestLab(found.directory, found.spec)
    try:
        yield lab
    finally:
        lab.down()
