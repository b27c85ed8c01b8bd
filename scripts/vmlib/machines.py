"""The machines themselves: brought up by Vagrant, kept as snapshots, put back from them."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.vmlib import house
from scripts.vmlib.model import FLEET, LOGS, RUN, SSH_CONFIG, VAGRANT, Fleet, Machine, VmTrouble

UP_WITHIN = 1800.0
ANSWERS_WITHIN = 300.0
ENVIRON = {
    "VAGRANT_HOME": str(RUN / "vagrant.d"),
    "VAGRANT_DOTFILE_PATH": str(RUN / "vagrant"),
    "VAGRANT_CWD": str(VAGRANT),
    "VAGRANT_NO_COLOR": "1",
    "VAGRANT_CHECKPOINT_DISABLE": "1",
    "VAGRANT_DEFAULT_PROVIDER": "libvirt",
}
# One key and one shared connection: under emulation each new connection takes a second.
SSH_COMMON = """\
Host *
  User root
  IdentityFile {fleet}/id_ed25519
  IdentitiesOnly yes
  UserKnownHostsFile {fleet}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 30
  ServerAliveInterval 15
  ServerAliveCountMax 4
  ControlMaster auto
  ControlPath /run/ssh-%C
  ControlPersist 600
"""


def vagrant(*words: str, timeout: float = 300) -> None:
    """What it says is in the logs, one for each thing it is asked to do."""
    LOGS.mkdir(parents=True, exist_ok=True)
    file = LOGS / f"vagrant-{'-'.join(word for word in words if word.replace('-', '').isalpha())[:40]}.log"
    with file.open("ab") as log:
        argv = house.command(["env", *(f"{key}={value}" for key, value in ENVIRON.items()), "vagrant", *words], VAGRANT)
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=timeout, check=False)
    if done.returncode != 0:
        tail = file.read_text(errors="replace")[-3000:]
        raise VmTrouble(f"vagrant {' '.join(words)}: exit {done.returncode}\n{tail}")


def virsh(*words: str, timeout: float = 120, check: bool = True) -> str:
    return house.run("virsh", "-q", "-c", "qemu:///system", *words, timeout=timeout, check=check).stdout


def boot(fleet: Fleet, boxes: dict[str, Path]) -> None:
    """All of them, from their boxes, until Vagrant has logged in to each."""
    for suite, box in boxes.items():
        vagrant("box", "add", "--force", "--name", f"cmdop-migrate-{suite}", str(box / f"{suite}.box"))
    vagrant("up", "--no-provision", "--parallel", timeout=UP_WITHIN)
    write_ssh_config(fleet)


def provision(fleet: Fleet, rsync: bool) -> None:
    """The scripts of vagrant/provision; with `rsync`, on the payload as it is now: `boot` has brought it. All at once:
    hosts wait for the store by themselves."""

    def one(machine: Machine) -> None:
        if rsync:
            vagrant("rsync", machine.name, timeout=600)
        vagrant("provision", machine.name, timeout=UP_WITHIN)

    _each(fleet.machines, one)


def write_ssh_config(fleet: Fleet) -> None:
    """Write an SSH config that uses Vagrant's own network, which no test cuts."""
    blocks = ""
    for one in fleet.machines:
        found = virsh("domifaddr", one.domain, "--source", "lease").split()
        address = next(word.partition("/")[0] for word in found if word.startswith("192.168.121."))
        blocks += f"Host {one.name}\n  HostName {address}\n  HostKeyAlias {one.name}\n"
    SSH_CONFIG.write_text(blocks + SSH_COMMON.format(fleet=FLEET))


def renew_addresses(fleet: Fleet) -> None:
    """Vagrant finds machines by the leases of their addresses, and those may be over since they were saved."""
    places = re.findall(r"^Host (\S+)\n  HostName (\S+)", SSH_CONFIG.read_text(), re.M)

    def one(machine: Machine) -> None:
        key = str((RUN / "boxes" / machine.suite / "key").resolve())
        options = ["-i", key, *(f"-o{word}" for word in ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"))]
        argv = ["ssh", *options, f"vagrant@{dict(places)[machine.name]}", "sudo networkctl renew eth0"]
        end = time.monotonic() + ANSWERS_WITHIN
        while (done := house.run(*argv, check=False)).returncode != 0:
            if time.monotonic() > end:
                raise VmTrouble(f"{machine.name} does not answer: {done.stderr[-500:]}")
            time.sleep(1)

    _each(fleet.machines, one)


def ssh(machine: Machine, script: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return house.run("ssh", "-F", str(SSH_CONFIG), machine.name, script, timeout=timeout, check=False)


def save(fleet: Fleet, name: str) -> None:
    """A snapshot of all, memory included, which replaces one of the same name."""

    def one(machine: Machine) -> None:
        virsh("snapshot-delete", machine.domain, name, timeout=300, check=False)
        virsh("snapshot-create-as", machine.domain, name, timeout=300)

    _each(fleet.machines, one)


def put_back(fleet: Fleet, name: str) -> None:
    """Restore the machines to a snapshot, and set their clocks, which stopped meanwhile."""
    start_networks()

    def one(machine: Machine) -> None:
        virsh("snapshot-revert", machine.domain, name, "--running", "--force", timeout=300)

    _each(fleet.machines, one)


def answer(fleet: Fleet) -> None:
    """Each lets root in, and knows what time it is."""

    def one(machine: Machine) -> None:
        end = time.monotonic() + ANSWERS_WITHIN
        while True:
            done = ssh(machine, f"date -s @{time.time():.2f} > /dev/null && systemctl is-system-running")
            if done.returncode in (0, 1):  # 1: degraded, which is not ours to judge
                return
            if time.monotonic() > end:
                raise VmTrouble(f"{machine.name} does not answer: {done.stderr[-500:]}")
            time.sleep(1)

    _each(fleet.machines, one)


def start_networks() -> None:
    for name in virsh("net-list", "--all", "--name").split():
        virsh("net-start", name, check=False)


def gather_logs(fleet: Fleet) -> Path:
    """What each of them knows about what went wrong; also of one that does not answer, as far as its console goes."""
    script = (
        "journalctl --no-pager -n 400; cmdop-migrate ls; cat /var/lib/cmdop-migrate/events.jsonl;"
        " tail -n 100 /var/lib/cmdop-migrate/log/*; cat /var/log/cmdop-doctor.log; free -m; ps auxf"
    )

    def one(machine: Machine) -> None:
        (LOGS / f"{machine.name}.log").write_text(ssh(machine, f"({script}) 2>&1", timeout=90).stdout)
        console = RUN / f"console-{machine.name}.log"
        if console.exists():
            shutil.copy(console, LOGS / console.name)

    LOGS.mkdir(parents=True, exist_ok=True)
    _each(fleet.machines, one)
    return LOGS


def _each(machines: Iterable[Machine], act: Callable[[Machine], None]) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(act, machines))
