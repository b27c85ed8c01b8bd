"""Simulate a host for a test: settings, directories, cgroups and addresses that no other test or user has.

done = host.cm("run", "-d", "--name", "t", "--", "sleep", "100")
host.leftovers()        # what is there that should not be, once every session has ended
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cmdop_migrate.holder import cgroup
from cmdop_migrate.holder import start as holder_start
from cmdop_migrate.session import network
from cmdop_migrate.util.faults import TEST_STOP
from tests.support.patience import Deadline, bound

T = TypeVar("T")
PROJECT = Path(__file__).resolve().parents[2]
OWN_GROUPS = ("holders", "restorers", "agent")
AGENT_FILES = ("agent.lock", "lease.proven", "link.json", "metrics.prom", "metrics.tmp", "ready.sock")
STOP = f"{TEST_STOP}="
CM = [sys.executable, "-m", "cmdop_migrate"]


def until(read: Callable[[], T], within: float = 10.0, what: str = "") -> T:
    """Return the first true value that `read` gives within so many seconds of an idle machine."""
    deadline = Deadline(within)
    while not (value := read()):
        if deadline.is_over():
            raise AssertionError(f"not within {within:g} s: {what or read}")
        time.sleep(0.02)
    return value


def free_subnet() -> str:
    """Return a /24 of the range for sessions that no interface of this machine uses."""
    taken = set(os.listdir("/sys/class/net"))
    while True:
        subnet = str(ipaddress.IPv4Network((0x64400000 + (random.randrange(1, 1 << 14) << 8), 24)))
        if not taken & veths_of(subnet):
            return subnet


def veths_of(subnet: str) -> set[str]:
    return {network.link_at(subnet, number).veth for number in range(64)}


@dataclass
class Host:
    dir: Path
    name: str = "host-t"
    subnet: str = field(default_factory=free_subnet)
    extra: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()  # put before every command: a namespace to run it in
    ttl: str = "15s"
    # Its commands are done by forks of a ready process: not where a test means a command's own pid. READY=1 in the
    # environment of the suite: everywhere, to see what else minds.
    ready: bool = field(default_factory=lambda: os.environ.get("READY") == "1")

    @property
    def state(self) -> Path:
        return self.dir / "s"

    @property
    def run(self) -> Path:
        return self.dir / "r"

    def env(self, **more: str) -> dict[str, str]:
        # PYTHON…: what a test runner may set, such as no compiled files, is not what users have.
        unwanted = ("CMDOP_", "LC_", "SUDO_", "PYTHON")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
        return {
            **kept,
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(PROJECT),
            "CMDOP_MIGRATE_CONFIG": os.devnull,
            "CMDOP_MIGRATE_STATE_DIR": str(self.state),
            "CMDOP_MIGRATE_RUN_DIR": str(self.run),
            "CMDOP_MIGRATE_HOST": self.name,
            "CMDOP_MIGRATE_SUBNET": self.subnet,
            "CMDOP_MIGRATE_LEASE_TTL": self.ttl,
            "CMDOP_MIGRATE_HOOKS_DIR": str(self.dir / "hooks"),
            "CMDOP_MIGRATE_READY": str(int(self.ready)),
            **self.extra,
            **more,
        }

    @property
    def paths(self) -> tuple[str, str]:
        """Return the state and run directories as its processes name them."""
        return str(self.state), str(self.run)

    def argv(self, *args: str, env: dict[str, str] | None = None) -> list[str]:
        """Return the command that runs the real command line there, with `env` added to its environment."""
        return [*self.prefix, *CM, *args]

    def cm(
        self, *args: str, env: dict[str, str] | None = None, timeout: float = 60, cwd: str = "/"
    ) -> subprocess.CompletedProcess[bytes]:
        """Run the real command line as its own process."""
        return subprocess.run(
            self.argv(*args, env=env),
            env=self.env(**(env or {})),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=bound(timeout),
            cwd=cwd,
            check=False,
        )

    def ok(self, *args: str, **options: Any) -> str:
        done = self.cm(*args, **options)
        assert done.returncode == 0, (
            f"{str(args)[:300]}: exit {done.returncode}\n{done.stdout!r}\n{done.stderr.decode()}"
        )
        return done.stdout.decode(errors="replace")

    def cm_json(self, *args: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ok("--json", *args, **options))
        return found

    def fails(self, *args: str, status: int, code: str, **options: Any) -> dict[str, Any]:
        """Assert that a command fails with this status and code in both forms: one line and a hint for people, and JSON for
        programs; return the JSON error."""
        done = self.cm(*args, **options)
        said = done.stderr.decode()
        assert done.returncode == status, (
            f"{str(args)[:300]}: exit {done.returncode}, not {status}\n{done.stdout!r}\n{said}"
        )
        assert done.stdout == b"", done.stdout
        lines = said.splitlines()
        assert lines[0].startswith("cmdop-migrate: ") and len(lines) == 2 and lines[1].startswith("  "), said
        assert "Traceback" not in said
        done = self.cm("--json", *args, **options)
        assert done.returncode == status
        error: dict[str, Any] = json.loads(done.stdout)["error"]
        assert set(error) == {"code", "exit", "message", "hint"}
        assert (error["code"], error["exit"]) == (code, status) and error["message"] and error["hint"], error
        return error

    def start(self, *command: str, name: str | None = None, options: tuple[str, ...] = ()) -> dict[str, Any]:
        named = ("--name", name) if name else ()
        return self.cm_json("run", "-d", *named, *options, "--", *command)

    def output(self, session: str, *options: str) -> str:
        return str(self.cm_json("output", session, *options)["data"])

    def wait_for(self, session: str, pattern: str, *options: str) -> dict[str, Any]:
        return self.cm_json("wait", session, "--for", pattern, "--timeout", f"{bound(20):.0f}s", *options)

    def sessions(self) -> list[dict[str, Any]]:
        return list(self.cm_json("ls")["sessions"])

    def events(self, session: str | None = None) -> list[dict[str, Any]]:
        try:
            lines = (self.state / "events.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [one for one in map(json.loads, lines) if session in (None, one.get("session"))]

    def group(self, session: str = "") -> str:
        mount = cgroup.mount_point()
        assert mount is not None
        host_id = (self.state / "host-id").read_text()
        return cgroup.path_of(mount, host_id, session).rstrip("/")

    def pids(self, session: str) -> list[int]:
        return cgroup.pids(self.group(session)) if (self.state / "host-id").exists() else []

    def holder(self, session: str) -> int:
        """Return the pid of the one holder of this session."""
        found = self.holders(session)
        assert len(found) == 1, found
        return found[0]

    def holders(self, session: str) -> list[int]:
        lock = f"{self.paths[0]}/sessions/{session}/holder.lock"
        return [pid for pid in cgroup.pids(self.group("holders")) if lock in open_files(pid)]

    def agent_pid(self) -> int | None:
        """Return the pid of this host's agent, or None."""
        lock = f"{self.paths[1]}/agent.lock"
        found = [pid for pid in self._agent_pids() if lock in open_files(pid)]
        assert len(found) <= 1, found
        return found[0] if found else None

    def _agent_pids(self) -> list[int]:
        return cgroup.pids(self.group("agent")) if (self.state / "host-id").exists() else []

    def kill_agent(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the agent, and wait until it is gone."""
        pid = self.agent_pid()
        if pid is not None:
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
            until(lambda: self.agent_pid() != pid, 10, "the agent ends")

    def session_dirs(self) -> list[str]:
        try:
            return os.listdir(self.state / "sessions")
        except FileNotFoundError:
            return []

    def session_mounts(self) -> list[str]:
        ours = [line for line in mounts() if f"{self.dir}/" in line and " - tmpfs host-t" not in line]
        return [line.split()[4] for line in ours]

    def session_links(self) -> set[str]:
        return veths_of(self.subnet) & set(os.listdir("/sys/class/net"))

    def processes(self) -> list[int]:
        """Return the pids of all processes that may belong to this host, others included."""
        return processes()

    def leftovers(self, ended: bool = False) -> list[str]:
        """List everything of this host that still exists; with `ended`, records of ended and parked sessions are allowed."""
        left = [f"mount {point}" for point in self.session_mounts()]
        left += [f"interface {name}" for name in self.session_links()]
        left += [f"file {path.name}" for path in self.run.glob("*") if path.name not in AGENT_FILES]
        others = set(self.processes()) - set(self._agent_pids())
        left += [f"process {pid}" for pid in others if any(self.paths[0] in one for one in open_files(pid))]
        if (self.state / "host-id").exists() and os.path.isdir(self.group()):
            for one in os.scandir(self.group()):
                if one.is_dir() and one.name not in OWN_GROUPS:
                    left.append(f"cgroup {one.name}")
            left += [f"holder {pid}" for pid in cgroup.pids(self.group("holders"))]
        for session in self.session_dirs():
            where = self.state / "sessions" / session
            record = json.loads((where / "session.json").read_text())
            if not ended or not (record["exit"] or record["phase"] == "parked"):
                left.append(f"directory {session}")
            if record["phase"] == "parked":
                left += [f"{one} of parked {session}" for one in holder_start.FILES if (where / one).exists()]
        return left

    def assert_clean(self, ended: bool = False, within: float = 5.0) -> None:
        """Assert that nothing of this host is left. The kernel removes network namespaces asynchronously, so this waits."""
        deadline = Deadline(within)
        while left := self.leftovers(ended):
            assert not deadline.is_over(), left
            time.sleep(0.05)

    def end_stopped(self) -> None:
        """Kill commands that a test has stopped at a step and never continued, because the test or the suite was ended. Their
        parent may be gone, so they are found by their settings."""
        for pid in self.processes():
            with contextlib.suppress(OSError, IndexError):
                state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                words = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0") if state == "T" else []
                if f"CMDOP_MIGRATE_STATE_DIR={self.state}" in words and any(one.startswith(STOP) for one in words):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End every session, and assert that nothing of this host is left."""
        self.end_stopped()
        if not (self.state / "host-id").exists():
            return
        with contextlib.suppress(FileNotFoundError):
            for pid in cgroup.pids(self.group("holders")):
                with contextlib.suppress(ProcessLookupError):  # a gate's process ends with its holder
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)
            for one in os.scandir(self.group()):
                if one.is_dir() and one.name not in OWN_GROUPS:
                    cgroup.kill(one.path)
        try:
            until(lambda: not cgroup.pids(self.group("holders")), 10, "holders end")
            self.cm("ls")
            self.kill_agent(signal.SIGTERM)
            self.assert_clean(ended=True)
        finally:
            for name in OWN_GROUPS:
                cgroup.remove(self.group(name))
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(self.group())


def mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()


def processes() -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != own]


def read_proc(pid: int, name: str) -> bytes:
    """Return /proc/PID/`name`, or nothing when the process has ended since it was listed."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def open_files(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


@contextlib.contextmanager
def a_host(directory: Path, **options: Any) -> Iterator[Host]:
    host = Host(directory, **options)
    try:
        yield host
    finally:
        host.close()


@contextlib.contextmanager
def pair(directory: Path, ttl: str = "3s", **options: Any) -> Iterator[tuple[Host, Host]]:
    """Yield two hosts that share a store, a lease store and a key."""
    shared = {
        "CMDOP_MIGRATE_STORE": f"file://{directory}/store",
        "CMDOP_MIGRATE_LEASE": f"sqlite://{directory}/lease/lease.db",
        "CMDOP_MIGRATE_KEY_FILE": f"{directory}/keys",
    }
    with contextlib.ExitStack() as stack:
        made = []
        for name in ("host-a", "host-b"):
            (directory / name).mkdir()
            host = Host(directory / name, name=name, ttl=ttl, extra=dict(shared), **options)
            stack.callback(host.close)
            made.append(host)
        yield made[0], made[1]
