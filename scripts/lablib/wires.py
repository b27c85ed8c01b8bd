"""The lab's network: a bridge in the switch's namespace and a cable from it to every other node."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from cmdop_migrate.holder import syscalls
from scripts.lablib.model import BITS, LabTrouble, NodeSpec

BRIDGE, INSIDE = "br0", "eth0"


def raise_bridge(switch: int, node: NodeSpec) -> None:
    _ip(
        switch,
        "link set lo up",
        f"link add {BRIDGE} type bridge forward_delay 0 stp_state 0",
        f"address add {node.address}/{BITS} dev {BRIDGE}",
        f"link set {BRIDGE} up",
    )


def lay_cable(switch: int, node: NodeSpec, pid: int) -> None:
    unplug(switch, node)  # what is left of the one to a node that was killed
    _ip(
        switch,
        f"link add {node.port} type veth peer name {INSIDE} netns {pid}",
        f"link set {node.port} master {BRIDGE}",
        f"link set {node.port} up",
    )
    _ip(
        pid,
        "link set lo up",
        f"link set {INSIDE} address {node.mac}",
        f"address add {node.address}/{BITS} dev {INSIDE}",
        f"link set {INSIDE} up",
    )


def unplug(switch: int, node: NodeSpec) -> None:
    """Connections that wait for an answer keep a dead node's network, and so its cable, for minutes."""
    subprocess.run(
        ["nsenter", "-t", str(switch), "-n", "ip", "link", "delete", node.port], capture_output=True, check=False
    )


def cut(switch: int, node: NodeSpec) -> None:
    """Take the cable out of the bridge; the link stays up: packets of both sides are lost, without a signal."""
    _ip(switch, f"link set {node.port} nomaster")


def heal(switch: int, node: NodeSpec) -> None:
    _ip(switch, f"link set {node.port} master {BRIDGE}")


@contextlib.contextmanager
def network_of(pid: int) -> Iterator[None]:
    """This thread is in the network of `pid`: sockets it makes stay there."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            syscalls.setns(there, syscalls.NEWNET)
        finally:
            os.close(there)
        try:
            yield
        finally:
            syscalls.setns(here, syscalls.NEWNET)
    finally:
        os.close(here)


def _ip(pid: int, *lines: str) -> None:
    command = ["nsenter", "-t", str(pid), "-n", "ip", "-batch", "-"]
    text = "\n".join(lines) + "\n"
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False, timeout=20)
    if done.returncode != 0:
        raise LabTrouble(f"ip, in the lab's network: {done.stderr.strip()} (one of: {'; '.join(lines)})")
