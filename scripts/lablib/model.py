"""What a lab consists of, as values: nothing here touches the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

LeaseKind = Literal["etcd", "etcd3", "s3"]
Kind = Literal["switch", "s3", "etcd", "host"]
NET = "10.99.0."  # every lab's own: no two labs, and no lab and machine, see each other
BITS = 24
SWITCH = "switch"
BUCKET = "lab"
SSH_PORT = 22
ETCD_PORT, ETCD_PEER_PORT = 2379, 2380
S3_PORTS = (8333, 9333, 8080, 8888, 23646)
MAX_HOSTS = 26
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")


class LabTrouble(Exception):
    """What went wrong and what to do, for the person who asked."""


@dataclass(frozen=True)
class NodeSpec:
    """A box with a cable: the switch, a server or a host."""

    name: str
    kind: Kind
    address: str

    @property
    def port(self) -> str:
        """Its end of the cable at the switch; at most 15 bytes."""
        return f"p-{self.name}"

    @property
    def mac(self) -> str:
        """The same after a reboot: others still know it."""
        return "02:00:00:00:00:{:02x}".format(int(self.address.rpartition(".")[2]))


@dataclass(frozen=True)
class Owner:
    """A process; `start` tells it from a later one with the same number."""

    pid: int
    start: int


@dataclass(frozen=True)
class LabSpec:
    name: str
    hosts: int
    lease: LeaseKind = "etcd"
    ttl: str = "15s"
    agents: bool = False
    owner: Owner | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise LabTrouble(f"not a name for a lab: {self.name!r}. Use small letters, digits and '-', at most 31.")
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise LabTrouble(f"a lab has 1 to {MAX_HOSTS} hosts, not {self.hosts}.")
        if self.lease not in get_args(LeaseKind):
            raise LabTrouble(f"no such lease store: {self.lease}. Valid: {', '.join(get_args(LeaseKind))}.")

    def nodes(self) -> tuple[NodeSpec, ...]:
        """The switch first, hosts last: the order in which they start."""
        members = {"etcd": 1, "etcd3": 3, "s3": 0}[self.lease]
        letters = "abcdefghijklmnopqrstuvwxyz"[: self.hosts]
        return (
            NodeSpec(SWITCH, "switch", f"{NET}1"),
            NodeSpec("s3", "s3", f"{NET}2"),
            *(NodeSpec(f"etcd-{number + 1}", "etcd", f"{NET}{3 + number}") for number in range(members)),
            *(NodeSpec(f"host-{letter}", "host", f"{NET}{11 + at}") for at, letter in enumerate(letters)),
        )

    def of_kind(self, kind: Kind) -> tuple[NodeSpec, ...]:
        return tuple(one for one in self.nodes() if one.kind == kind)

    def node(self, name: str) -> NodeSpec:
        for one in self.nodes():
            if one.name == name:
                return one
        valid = ", ".join(one.name for one in self.nodes() if one.kind != "switch")
        raise LabTrouble(f"no {name!r} in the lab {self.name}. It has: {valid}.")

    @property
    def store_url(self) -> str:
        return self._s3_url("store")

    @property
    def lease_url(self) -> str:
        if self.lease == "s3":
            return self._s3_url("lease")
        return f"etcd://{','.join(f'{one.address}:{ETCD_PORT}' for one in self.of_kind('etcd'))}/lab"

    def _s3_url(self, prefix: str) -> str:
        (server,) = self.of_kind("s3")
        return f"s3://{BUCKET}/{prefix}?endpoint=http://{server.address}:{S3_PORTS[0]}&region=us-east-1"

    def to_json(self) -> dict[str, Any]:
        owner = None if self.owner is None else [self.owner.pid, self.owner.start]
        fields = {"name": self.name, "hosts": self.hosts, "lease": self.lease, "ttl": self.ttl, "agents": self.agents}
        return {**fields, "owner": owner}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> LabSpec:
        owner = None if found["owner"] is None else Owner(*found["owner"])
        return cls(found["name"], found["hosts"], found["lease"], found["ttl"], found["agents"], owner)
