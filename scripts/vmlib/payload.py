"""What goes into the machines at /vagrant: the project's wheel, and settings and keys of this fleet."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from cmdop_migrate.images.format import keys
from cmdop_migrate.relay import certificate
from scripts.vmlib import base, inputs
from scripts.vmlib.model import ACCESS_KEY, FLEET, PAYLOAD, PROJECT, SECRET_KEY, Fleet, Machine


def make(fleet: Fleet) -> None:
    """The project anew; the keys once, for they are in the machines that were booted before."""
    shutil.rmtree(PAYLOAD / "project", ignore_errors=True)
    scripts = PAYLOAD / "project" / "scripts"
    scripts.mkdir(parents=True)
    base.wheel(PAYLOAD / "project")
    for name in inputs.PROJECT_SCRIPTS:
        source = PROJECT / "scripts" / name
        if source.is_dir():
            shutil.copytree(source, scripts / name)
        else:
            shutil.copy(source, scripts / name)
    if not FLEET.exists():
        _keys(fleet)
    for one in fleet.machines:
        (FLEET / f"config-{one.name}.toml").write_text(config_text(fleet, one))


def _keys(fleet: Fleet) -> None:
    work = FLEET.with_suffix(".new")
    shutil.rmtree(work, ignore_errors=True)
    (work / "hostkeys").mkdir(parents=True, mode=0o700)
    keys.load_or_create(work / "keys")
    _ssh_key(work / "id_ed25519", "fleet")
    known = ""
    for one in fleet.machines:
        _ssh_key(work / "hostkeys" / one.name, one.name)
        public = (work / "hostkeys" / f"{one.name}.pub").read_text().split()[:2]
        known += f"{one.name},{one.address} {' '.join(public)}\n"
    (work / "known_hosts").write_text(known)
    (work / "hosts").write_text("".join(f"{one.address} {one.name}\n" for one in fleet.machines))
    made = certificate.self_signed(work / "tls")
    shutil.copy(made, work / "relay.pem")
    (work / "relay.pin").write_text(certificate.pin_of(made))
    (work / "aws").write_text(
        f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\nregion = us-east-1\n"
    )
    admin = {
        "name": "fleet",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (work / "s3.json").write_text(json.dumps({"identities": [admin]}))
    work.rename(FLEET)


def config_text(fleet: Fleet, machine: Machine) -> str:
    values = {"host": machine.name, "store": fleet.store_url, "lease": fleet.lease_url, "lease_ttl": fleet.ttl}
    if machine.role == "host":
        values["relay"] = fleet.relay_url
    own = "".join(f'{key} = "{value}"\n' for key, value in values.items())
    others = [one for one in fleet.hosts if one.name != machine.name]
    return own + "".join(f'\n[hosts.{one.name}]\naddress = "{one.address}"\nuser = "root"\n' for one in others)


def _ssh_key(path: Path, comment: str) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    subprocess.run(command, check=True, timeout=20, stdin=subprocess.DEVNULL)
