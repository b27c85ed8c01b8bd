"""The machines of scripts/test-vm, for tests: hosts with all that tests/support/host.py can do, and what happens to real machines.

a, b = vms.a, vms.b
a.start("sleep", "100", name="t"); a.shell("uname -r")      # over SSH, by a network that is never cut
vms.power_cut(a); vms.boot(a); vms.pause(a); vms.resume(a); vms.cut(a); vms.heal(a)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cmdop_migrate.gateway import client
from cmdop_migrate.gateway.relay_channel import RelayStream
from scripts.vmlib.model import FLEET, RUN, SSH_CONFIG, Fleet
from tests.support.host import Host, until

SLOW = 240.0  # seconds for what takes two on a machine that is not emulated
STATE_DIR = "/var/lib/cmdop-migrate"
CONSOLE_NETWORK = "cmdop-vm-console"
# One process that starts no other: what is started after a move to another distribution meets the libraries that came along
# (docs/operations/plan.md).
COUNT = "import itertools, time\nfor n in itertools.count(1):\n    print('n', n, flush=True)\n    time.sleep(0.2)"
# Takes sessions again, and has none: those whose record says they ended are left alone, a command takes its time.
CLEAR = f"""cd {STATE_DIR}; [ ! -e draining.json ] || cmdop-migrate undrain
for each in sessions/*/; do
    each=$(basename "$each")
    grep -qs '"phase": *"exited"' "sessions/$each/session.json" || [ ! -e "sessions/$each" ] || cmdop-migrate kill "$each" --signal KILL || true
done"""


@dataclass
class VmHost(Host):
    """A machine of its own. `cm` and `shell` go by Vagrant's network, so that they work when the other is cut."""

    fleet: Fleet = field(kw_only=True)
    subnet: str = "100.64.0.0/10"

    @property
    def address(self) -> str:
        return self.fleet.machine(self.name).address

    def ssh(self, script: str) -> list[str]:
        return ["ssh", "-F", str(SSH_CONFIG), self.name, script]

    def argv(self, *args: str, env: dict[str, str] | None = None) -> list[str]:
        pairs = [f"{key}={value}" for key, value in {**self.extra, **(env or {})}.items()]
        return self.ssh(shlex.join(["env", *pairs, "cmdop-migrate", *args]))

    def cm(
        self, *args: str, env: dict[str, str] | None = None, timeout: float = SLOW, cwd: str = "/"
    ) -> subprocess.CompletedProcess[bytes]:
        return super().cm(*args, env=env, timeout=timeout, cwd=cwd)

    def wait_for(self, session: str, pattern: str, *options: str) -> dict[str, Any]:
        return self.cm_json("wait", session, "--for", pattern, "--timeout", "180s", *options)

    def shell(self, script: str, timeout: float = SLOW) -> str:
        """As root; must succeed."""
        done = subprocess.run(
            self.ssh(script), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{script}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def write(self, path: str, text: str) -> None:
        subprocess.run(self.ssh(f"cat > {path}"), input=text, text=True, timeout=SLOW, check=True)

    def events(self, session: str | None = None) -> list[dict[str, Any]]:
        found = []
        for line in self.shell(f"cat {STATE_DIR}/events.jsonl 2> /dev/null || true").splitlines():
            with contextlib.suppress(ValueError):  # cut in the middle when the power was
                found.append(json.loads(line))
        return [one for one in found if session in (None, one.get("session"))]

    def wait_event(self, session: str, kind: str, within: float = 120) -> dict[str, Any]:
        found = until(lambda: [one for one in self.events(session) if one["event"] == kind], within, f"{kind} here")
        return found[-1]

    def numbers(self, session: str) -> list[int]:
        """All it counted so far: none left out, none twice."""
        found = [int(one) for one in re.findall(r"^n (\d+)\r?$", self.output(session), re.M)]
        assert found == list(range(found[0], found[0] + len(found))) if found else True, found
        return found

    def counter(self, name: str, *options: str) -> str:
        """A session that counts -> its id."""
        session: str = self.start("python3", "-c", COUNT, name=name, options=options)["session"]
        return session

    def counts_on(self, session: str) -> int:
        """-> a number it was seen to say. All before are there, once and in order."""
        wanted = until(lambda: self.numbers(session), 120, f"it counts on {self.name}")[-1] + 3
        self.wait_for(session, rf"n {wanted}\b")
        return wanted

    def fails(self, *args: str, status: int, code: str, **options: Any) -> dict[str, Any]:
        """As programs see it; how people are told is shown elsewhere, and every command takes its time here."""
        done = self.cm("--json", *args, **options)
        assert done.returncode == status, f"{args}: exit {done.returncode}\n{done.stdout!r}\n{done.stderr.decode()}"
        error: dict[str, Any] = json.loads(done.stdout)["error"]
        assert error["code"] == code, error
        return error

    def runs(self, session: str) -> bool:
        """By its record and the kernel; no command is asked, each takes its time here."""
        record = self.shell(f"cat {STATE_DIR}/sessions/{session}/session.json 2> /dev/null || echo '{{}}'")
        frozen = self.shell(f"cat /sys/fs/cgroup/cmdop-migrate/*/{session}/cgroup.freeze 2> /dev/null || echo 1")
        return json.loads(record).get("phase") == "live" and frozen.strip() == "0" and bool(self.session_pids(session))

    def session_pids(self, session: str) -> list[int]:
        """Its processes, as the kernel of its host counts them."""
        return [
            int(one) for one in self.shell(f"cat /sys/fs/cgroup/cmdop-migrate/*/{session}/cgroup.procs || true").split()
        ]

    def close(self) -> None:
        """Ends with its machine."""


@dataclass(frozen=True)
class Machines:
    fleet: Fleet

    def host(self, name: str) -> VmHost:
        return VmHost(RUN, name=name, ttl=self.fleet.ttl, fleet=self.fleet)

    @property
    def a(self) -> VmHost:
        return self.host("host-a")

    @property
    def b(self) -> VmHost:
        return self.host("host-b")

    @property
    def store(self) -> VmHost:
        return self.host("store")

    @property
    def hosts(self) -> tuple[VmHost, VmHost]:
        return self.a, self.b

    # ---- what happens to machines

    def virsh(self, *words: str) -> str:
        argv = ["virsh", "-q", "-c", "qemu:///system", *words]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SLOW, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def domain(self, host: VmHost) -> str:
        return self.fleet.machine(host.name).domain

    def state(self, host: VmHost) -> str:
        """running, paused, shut off …"""
        return self.virsh("domstate", self.domain(host)).strip()

    def power_cut(self, host: VmHost) -> None:
        self.virsh("destroy", self.domain(host))
        self.forget(host)

    def boot(self, host: VmHost) -> None:
        """And wait until it answers."""
        self.virsh("start", self.domain(host))
        self.answers(host)

    def reboot(self, host: VmHost) -> None:
        """As its own administrator does it."""
        before = self.boot_id(host)
        subprocess.run(host.ssh("systemctl reboot"), capture_output=True, timeout=SLOW, check=False)
        self.forget(host)
        until(lambda: self._quietly(host, "cat /proc/sys/kernel/random/boot_id") not in ("", before), 400, "it is back")

    def boot_id(self, host: VmHost) -> str:
        return host.shell("cat /proc/sys/kernel/random/boot_id").strip()

    def pause(self, host: VmHost) -> None:
        self.virsh("suspend", self.domain(host))
        self.forget(host)

    def resume(self, host: VmHost) -> None:
        self.virsh("resume", self.domain(host))

    def cut(self, host: VmHost) -> None:
        """The cable of the network that the machines share; ours stays."""
        self.virsh("domif-setlink", self.domain(host), self._interface(host), "down")

    def heal(self, host: VmHost) -> None:
        self.virsh("domif-setlink", self.domain(host), self._interface(host), "up")

    @contextlib.contextmanager
    def other_processor(self, host: VmHost, change: str) -> Iterator[None]:
        """It boots with a processor that lacks something (`-avx2`), and with its own again in the end."""
        domain = self.domain(host)
        own = self.virsh("dumpxml", domain, "--inactive")
        if "<qemu:arg value='max," in own:
            other = re.sub(r"(<qemu:arg value='max,[^']*)'", rf"\1,{change}'", own)
        else:
            feature = f"<feature policy='disable' name='{change.lstrip('-')}'/>"
            other = re.sub(r"(<cpu [^>]*?)(/>|>)", rf"\1>{feature}" + r"\2", own).replace(
                f"{feature}/>", f"{feature}</cpu>"
            )
        assert other != own, own
        try:
            self._boot_as(host, other)
            yield
        finally:
            self._boot_as(host, own)

    def _boot_as(self, host: VmHost, xml: str) -> None:
        file = RUN / f"{host.name}.xml"
        file.write_text(xml)
        self.virsh("define", str(file))
        self.power_cut(host)
        self.boot(host)

    def _interface(self, host: VmHost) -> str:
        rows = [line.split() for line in self.virsh("domiflist", self.domain(host)).splitlines()]
        return next(row[4] for row in rows if row and row[2] != CONSOLE_NETWORK)

    def forget(self, host: VmHost) -> None:
        """The kept connection to it: it leads nowhere."""
        argv = ["ssh", "-F", str(SSH_CONFIG), "-O", "exit", host.name]
        subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)

    def answers(self, host: VmHost, within: float = 400) -> None:
        until(lambda: self._quietly(host, "echo yes") == "yes", within, f"{host.name} answers")

    def _quietly(self, host: VmHost, script: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                host.ssh(script), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
            )
            if done.returncode == 0:
                return done.stdout.strip()
        time.sleep(1)
        return ""

    def mend(self) -> None:
        """However a test ended: every machine runs, is connected, answers, and has no session."""
        for host in (*self.hosts, self.store):
            state = self.state(host)
            if state == "paused":
                self.resume(host)
            elif state != "running":
                self.virsh("start", self.domain(host))
            self.heal(host)
        for host in self.hosts:
            self.answers(host)
            host.shell(f"date -s @{time.time():.2f} > /dev/null; rm -f /etc/cron.d/vm-*; {CLEAR}")

    # ---- clients

    def credential(self, actor: str = "ann", role: str = "execute") -> Path:
        """The file a person has who may come to every session by the relay, and to no host."""
        file = RUN / f"{actor}-{os.urandom(3).hex()}.credential"
        words = ("--actor", actor, "--role", role, "--session", "*", "--relay", self.fleet.relay_url)
        pin = (FLEET / "relay.pin").read_text()
        text = self.a.cm_json("relay", "token", "create", *words, "--pin", pin)["credential"]
        file.write_text(text)
        file.chmod(0o600)
        return file

    def line(self, file: Path, session: str) -> RelayStream:
        found = client.load(file)
        assert found.relay
        return RelayStream(found.relay, found, session)


@contextlib.contextmanager
def mended(vms: Machines) -> Iterator[Machines]:
    try:
        yield vms
    finally:
        vms.mend()
