"""The servers of a lab: real ones, in boxes of their own, so that they are cut off, killed and paused as hosts are."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

from scripts.lablib.boot import Room
from scripts.lablib.model import BUCKET, ETCD_PEER_PORT, ETCD_PORT, S3_PORTS, SSH_PORT, LabSpec, LabTrouble, NodeSpec
from tests.support.etcd_server import Member
from tests.support.servers import S3Server, prepare_seaweed, weed_binary

WEED = "/run/weed"
READY_WITHIN = 30.0


def s3(directory: Path, node: NodeSpec) -> S3Server:
    return S3Server(directory / "nodes" / node.name, S3_PORTS, node.address)


def member(directory: Path, spec: LabSpec, node: NodeSpec) -> Member:
    everyone = ",".join(f"{one.name}=http://{one.address}:{ETCD_PEER_PORT}" for one in spec.of_kind("etcd"))
    home = directory / "nodes" / node.name
    return Member(node.name, home, ETCD_PORT, ETCD_PEER_PORT, everyone, node.address)


def furnish(directory: Path, node: NodeSpec) -> None:
    if node.kind == "s3":
        prepare_seaweed(directory / "nodes" / node.name)


def room(directory: Path, spec: LabSpec, node: NodeSpec, group: str) -> Room:
    home = directory / "nodes" / node.name
    if node.kind == "switch":
        return Room(node.name, group, home / "log", ("sleep", "infinity"))
    if node.kind == "etcd":
        return Room(node.name, group, home / "log", _in(home, *member(directory, spec, node).command()))
    # It puts sockets, named after its ports, and logs into /tmp: an own one, or several labs would meet there.
    _, *options = s3(directory, node).command()
    binds = ((weed_binary(), WEED), (str(home), str(home)))
    return Room(node.name, group, home / "log", _in(home, WEED, *options), binds, ("/run", "/tmp"))


def _in(home: Path, *command: str) -> tuple[str, ...]:
    return ("sh", "-c", 'cd "$0" && exec "$@"', str(home), *command)


def trouble(directory: Path, spec: LabSpec, node: NodeSpec) -> str | None:
    """Why it cannot be used yet. Call it in the lab's network."""
    if node.kind == "etcd":
        return member(directory, spec, node).trouble()
    if node.kind == "host":
        try:
            socket.create_connection((node.address, SSH_PORT), timeout=1).close()
        except OSError as error:
            return str(error)
    if node.kind == "s3":
        try:
            socket.create_connection((node.address, S3_PORTS[0]), timeout=1).close()
        except OSError as error:
            return str(error)
        return s3(directory, node).trouble() or _make_bucket(s3(directory, node))
    return None


def _make_bucket(server: S3Server) -> str | None:
    client = server.client()
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
        client.create_bucket(Bucket=BUCKET)
    return None


def wait(directory: Path, spec: LabSpec, node: NodeSpec) -> None:
    until = time.monotonic() + READY_WITHIN
    while (why := trouble(directory, spec, node)) is not None:
        if time.monotonic() > until:
            tail = (directory / "nodes" / node.name / "log").read_text(errors="replace")[-1500:]
            raise LabTrouble(f"{node.name} does not get ready: {why}\n{tail}")
        time.sleep(0.02)
