"""The disks of a host: copies and directories of its own, seen at their usual paths; the rest is the machine's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from cmdop_migrate import config as settings
from cmdop_migrate.images.format import keys
from scripts.lablib.boot import HOME, PATH, Room
from scripts.lablib.model import SSH_PORT, LabSpec, NodeSpec
from tests.support.servers import ACCESS_KEY, SECRET_KEY

PROJECT = Path(__file__).resolve().parents[2]
CRIU = f"{settings.DEFAULT_STATE_DIR}/criu"
# disk -> where the host sees it
DISKS = {"state": settings.DEFAULT_STATE_DIR, "etc": "/etc", "srv": "/srv", "sbin": "/usr/local/sbin"}
SSHD = f"""\
Port {SSH_PORT}
AddressFamily inet
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
PrintMotd no
AuthorizedKeysFile .ssh/authorized_keys
MaxStartups 100:30:200
MaxSessions 100
AcceptEnv LANG LC_*
SetEnv PATH={PATH}
Subsystem sftp internal-sftp
"""


def share(directory: Path, spec: LabSpec) -> None:
    """What all hosts have in common: the key that seals images, and a key for SSH."""
    keys.load_or_create(directory / "keys")
    (directory / "ssh").mkdir(mode=0o700)
    _ssh_key(directory / "ssh" / "id_ed25519", spec.name)


def host(directory: Path, spec: LabSpec, node: NodeSpec) -> None:
    """Makes the disks of one host."""
    home = directory / "nodes" / node.name
    for disk in ("state/criu", "srv/root/.ssh", "srv/root/.aws"):
        (home / disk).mkdir(parents=True, mode=0o700)
    subprocess.run(["cp", "-a", "--reflink=auto", "/etc", str(home / "etc")], check=True, timeout=60)
    shutil.copytree("/usr/local/sbin", home / "sbin", symlinks=True)
    _etc(home / "etc", spec, node)
    shutil.copy(directory / "keys", home / "state" / "keys")
    _place(home / "srv/root/.aws/credentials", _credentials(), 0o600)
    _place(home / "sbin/cmdop-migrate", _wrapper(), 0o755)
    lab_key = directory / "ssh" / "id_ed25519"
    _place(home / "srv/root/.ssh/id_ed25519", lab_key.read_text(), 0o600)
    _place(home / "srv/root/.ssh/authorized_keys", lab_key.with_suffix(".pub").read_text(), 0o600)


def acquaint(directory: Path, spec: LabSpec) -> None:
    """Once all hosts have keys: everybody knows them, and people on the machine can ssh -F LAB/ssh/config host-a."""
    lines, blocks = [], []
    for node in spec.of_kind("host"):
        public = directory / "nodes" / node.name / "etc/ssh/ssh_host_ed25519_key.pub"
        lines.append(f"{node.name},{node.address} {' '.join(public.read_text().split()[:2])}\n")
        blocks.append(f"Host {node.name}\n  HostName {node.address}\n  HostKeyAlias {node.name}\n")
    known = "".join(lines)
    _place(directory / "ssh/known_hosts", known, 0o600)
    for node in spec.of_kind("host"):
        _place(directory / "nodes" / node.name / "etc/ssh/ssh_known_hosts", known, 0o644)
        _place(directory / "nodes" / node.name / "srv/root/.ssh/known_hosts", known, 0o600)
    pipe, pid = PROJECT / "scripts/lablib/pipe.py", directory / "nodes/switch/pid"
    common = {
        "User": "root",
        "IdentityFile": directory / "ssh/id_ed25519",
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": directory / "ssh/known_hosts",
        "GlobalKnownHostsFile": os.devnull,
        "StrictHostKeyChecking": "yes",
        "ProxyCommand": f"{sys.executable} -I -S {pipe} {pid} %h %p",
    }
    blocks.append("Host *\n" + "".join(f"  {key} {value}\n" for key, value in common.items()))
    _place(directory / "ssh/config", "".join(blocks), 0o600)


def room(directory: Path, spec: LabSpec, node: NodeSpec, group: str) -> Room:
    home = directory / "nodes" / node.name
    binds = [(str(home / disk), point) for disk, point in DISKS.items()]
    if os.path.isdir(CRIU):
        binds.append((CRIU, CRIU))
    agent = "cmdop-migrate agent & " if spec.agents else ""
    command = f"mkdir -m 755 /run/sshd; {agent}exec /usr/sbin/sshd -D -e -f /etc/ssh/sshd_config"
    return Room(node.name, group, home / "log", ("sh", "-c", command), tuple(binds), ("/run", "/dev/shm"))


def _etc(etc: Path, spec: LabSpec, node: NodeSpec) -> None:
    shutil.rmtree(etc / "ssh", ignore_errors=True)
    shutil.rmtree(etc / "cmdop-migrate", ignore_errors=True)
    for made in ("ssh", "cmdop-migrate"):
        (etc / made).mkdir(mode=0o755)
    _ssh_key(etc / "ssh/ssh_host_ed25519_key", node.name)
    _place(etc / "ssh/sshd_config", SSHD, 0o644)
    _place(etc / "hostname", f"{node.name}\n", 0o644)
    table = "".join(f"{one.address} {one.name}\n" for one in spec.nodes())
    _place(etc / "hosts", f"127.0.0.1 localhost\n{table}", 0o644)
    _place(etc / "resolv.conf", "# a lab has no name server; see /etc/hosts\n", 0o644)
    _place(etc / "cmdop-migrate/config.toml", config_text(spec, node), 0o644)
    _set_field(etc / "passwd", 5, HOME)
    _set_field(etc / "shadow", 1, "*")  # no password, but not locked: sshd refuses those even with a key


def config_text(spec: LabSpec, node: NodeSpec) -> str:
    values = {"host": node.name, "store": spec.store_url, "lease": spec.lease_url, "lease_ttl": spec.ttl}
    if criu := settings.load().criu:
        values["criu"] = criu
    own = "".join(f'{key} = "{value}"\n' for key, value in values.items())
    others = [one for one in spec.of_kind("host") if one.name != node.name]
    return own + "".join(f'\n[hosts.{one.name}]\naddress = "{one.address}"\nuser = "root"\n' for one in others)


def _set_field(table: Path, field: int, value: str) -> None:
    """In root's line."""
    lines = [line.split(":") for line in table.read_text().split("\n")]
    for line in lines:
        if line[0] == "root":
            line[field] = value
    table.write_text("\n".join(":".join(line) for line in lines))


def _credentials() -> str:
    return f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"


def _wrapper() -> str:
    """The command as people type it, from this project's tree, as the interpreter that made the lab runs it."""
    return f'#!/bin/sh\nPYTHONPATH="{PROJECT}" exec "{sys.executable}" -m cmdop_migrate "$@"\n'


def _ssh_key(path: Path, comment: str) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    subprocess.run(command, check=True, timeout=20, stdin=subprocess.DEVNULL)


def _place(path: Path, text: str, mode: int) -> None:
    path.unlink(missing_ok=True)  # what the machine has there may be a link
    path.write_text(text)
    path.chmod(mode)
