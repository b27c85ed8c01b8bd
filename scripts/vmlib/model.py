"""What there is, as values: the machines of vagrant/machines.json, and where everything is kept.

.cache/vm/base-KEY/           what machines install that is not the project: wheels, CRIU, the S3 server
.cache/vm/boxes/SUITE-KEY/    a box
.cache/vm/run/                the machines of this checkout: disks, snapshots, logs, keys of the fleet
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
VAGRANT = PROJECT / "vagrant"
CACHE = PROJECT / ".cache" / "vm"
RUN = CACHE / "run"
PAYLOAD = RUN / "payload"
FLEET = PAYLOAD / "fleet"
SSH_CONFIG = RUN / "ssh-config"
LOGS = RUN / "logs"
# Emulated, and beside others on two cores, a request to etcd may take three seconds.
TTL = "30s"
# As the hosts see them, on the store.
S3_PORT, ETCD_PORT, RELAY_PORT = 8333, 2379, 7443
BUCKET = "fleet"
ACCESS_KEY, SECRET_KEY = "fleet", "fleet-secret"


class VmTrouble(Exception):
    """What went wrong and what to do, for the person who asked."""


class CannotHere(VmTrouble):
    """This machine cannot run virtual machines: no failure of the project."""


@dataclass(frozen=True)
class Machine:
    name: str
    role: str
    suite: str
    address: str

    @property
    def domain(self) -> str:
        """Its name to libvirt."""
        return f"cmdop-vm-{self.name}"


@dataclass(frozen=True)
class Fleet:
    machines: tuple[Machine, ...]
    ttl: str = TTL

    @property
    def suites(self) -> tuple[str, ...]:
        return tuple(sorted({one.suite for one in self.machines}))

    @property
    def hosts(self) -> tuple[Machine, ...]:
        return tuple(one for one in self.machines if one.role == "host")

    def machine(self, name: str) -> Machine:
        for one in self.machines:
            if one.name == name:
                return one
        raise VmTrouble(f"no {name!r}. There are: {', '.join(one.name for one in self.machines)}.")

    @property
    def store_url(self) -> str:
        endpoint = f"http://{self.machine('store').address}:{S3_PORT}"
        return f"s3://{BUCKET}/store?endpoint={endpoint}&region=us-east-1"

    @property
    def lease_url(self) -> str:
        return f"etcd://{self.machine('store').address}:{ETCD_PORT}/fleet"

    @property
    def relay_url(self) -> str:
        return f"wss://{self.machine('store').address}:{RELAY_PORT}"


def fleet() -> Fleet:
    spec = json.loads((VAGRANT / "machines.json").read_text())
    table = spec["machines"].items()
    return Fleet(tuple(Machine(name, one["role"], one["suite"], one["address"]) for name, one in table))
