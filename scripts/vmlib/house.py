"""libvirtd in namespaces of its own: it sees its own settings, and a network with nothing but its bridges.

All of it, the virtual machines too, lives below one process, the keeper. When
that is killed everything is gone but the disks; so after any crash the next run
clears up by one pid. Of the machine's own libvirt nothing is read but the packaged
settings, and nothing is written.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.lablib import place
from scripts.lablib.model import Owner
from scripts.vmlib.model import RUN, VmTrouble

KEEPER = RUN / "keeper.json"
HOME = RUN / "libvirt"
# directory of ours -> where libvirt looks for it
BINDS = {"etc": "/etc/libvirt", "lib": "/var/lib/libvirt", "log": "/var/log/libvirt", "cache": "/var/cache/libvirt"}
QEMU_CONF = """\
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
cgroup_controllers = [ ]
namespaces = [ ]
stdio_handler = "file"
clear_emulator_capabilities = 0
"""
LIBVIRTD_CONF = """\
unix_sock_group = "root"
unix_sock_rw_perms = "0700"
auth_unix_ro = "none"
auth_unix_rw = "none"
log_outputs = "3:stderr"
"""
INSIDE = """
set -e
mount -t tmpfs -o mode=755 none /run
mkdir -p /run/libvirt /run/lock
for each in etc:/etc/libvirt lib:/var/lib/libvirt log:/var/log/libvirt cache:/var/cache/libvirt; do
    mkdir -p "${each#*:}"
    mount --bind "$0/${each%%:*}" "${each#*:}"
done
mount -t sysfs none /sys
ip link set lo up
touch /run/ready
exec /usr/sbin/libvirtd --config /etc/libvirt/libvirtd.conf
"""
START_WITHIN = 90.0


def keeper() -> int | None:
    """Its pid, while it lives."""
    try:
        known = Owner(**json.loads(KEEPER.read_text()))
    except FileNotFoundError:
        return None
    return known.pid if place.is_alive(known) else None


def up() -> None:
    """Returns when libvirtd answers. One that is up already is left as it is."""
    if keeper() is not None:
        return
    _furnish()
    words = [
        "unshare",
        "--mount",
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--propagation",
        "private",
    ]
    init = ["tini-static", "-g", "--", "bash", "-c", INSIDE, str(HOME)]
    with (RUN / "libvirtd.log").open("wb") as log:
        made = subprocess.Popen(
            [*words, *init], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    owner = place.owner_of(made.pid)
    KEEPER.write_text(json.dumps({"pid": owner.pid, "start": owner.start}))
    end = time.monotonic() + START_WITHIN
    while not _answers():
        if made.poll() is not None or time.monotonic() > end:
            down()
            raise VmTrouble(f"libvirtd does not start:\n{(RUN / 'libvirtd.log').read_text()[-1500:]}")
        time.sleep(0.2)


def _furnish() -> None:
    for name in BINDS:
        (HOME / name).mkdir(parents=True, exist_ok=True)
    if not (HOME / "etc/libvirtd.conf").exists():
        shutil.copytree("/etc/libvirt", HOME / "etc", symlinks=True, dirs_exist_ok=True)
        for link in (HOME / "etc/qemu/networks/autostart").glob("*"):
            link.unlink()  # no network but those of our machines
    (HOME / "etc/qemu.conf").write_text(QEMU_CONF)
    (HOME / "etc/libvirtd.conf").write_text(LIBVIRTD_CONF)


def _answers() -> bool:
    inner = _inner()
    if inner is None or not Path(f"/proc/{inner}/root/run/ready").exists():
        return False
    return run("virsh", "-q", "-c", "qemu:///system", "version", check=False).returncode == 0


def _inner() -> int | None:
    """The first process of the pid namespace: the keeper's child."""
    pid = keeper()
    if pid is None:
        return None
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return None
    return int(children[0]) if children else None


def command(argv: Sequence[str], cwd: Path | str = "/") -> list[str]:
    """`argv`, in there."""
    inner = _inner()
    if inner is None:
        raise VmTrouble("the virtual machines are not up: scripts/test-vm --keep")
    return ["nsenter", "-t", str(inner), "-m", "-n", "-p", f"--wdns={cwd}", "--", *argv]


def run(
    *argv: str, timeout: float = 120, check: bool = True, env: dict[str, str] | None = None, cwd: Path | str = "/"
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(argv, cwd),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        env=None if env is None else {**os.environ, **env},
        check=False,
    )
    if check and done.returncode != 0:
        raise VmTrouble(f"{' '.join(argv)[:200]}: exit {done.returncode}\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    return done


def down() -> None:
    """Ends everything in there at once."""
    pid = keeper()
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 20
        while keeper() is not None and time.monotonic() < end:
            time.sleep(0.05)
    KEEPER.unlink(missing_ok=True)
