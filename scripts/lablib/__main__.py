"""scripts/lab: a lab of hosts on this machine.

  scripts/lab up 3                    three hosts, host-a to host-c, an S3 server and a lease store
  scripts/lab exec host-a cmdop-migrate run -d --name t -- top
  scripts/lab ssh host-a              over the lab's network, as hosts reach each other
  scripts/lab cut host-a              a broken wire; heal puts it right
  scripts/lab pause host-a            asleep; resume wakes it
  scripts/lab kill host-a             sudden death; start boots it again, with its disks
  scripts/lab ls                      the labs of this machine; with --name, the nodes of one
  scripts/lab down                    and nothing of it is left

The servers (s3, etcd-1 …) are cut, paused, killed and started like hosts. --name tells several labs apart.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import get_args

from scripts.lablib import lab as labs
from scripts.lablib import place
from scripts.lablib.lab import Lab
from scripts.lablib.model import LabSpec, LabTrouble, LeaseKind

VERBS = ("cut", "heal", "kill", "start", "pause", "resume")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="scripts/lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--name", metavar="LAB", help="which lab (lab)")
    commands = top.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="make a lab")
    up.add_argument("hosts", type=int, metavar="N", help="how many hosts")
    up.add_argument("--lease", choices=get_args(LeaseKind), default="etcd", help="the lease store (etcd)")
    up.add_argument("--ttl", default="15s", help="lease_ttl of the hosts (15s)")
    up.add_argument("--agents", action="store_true", help="agents run from boot on, not only when needed")
    up.add_argument("--owner", type=int, metavar="PID", help="when this process is dead, the next `up` removes the lab")
    commands.add_parser("down", help="end a lab and remove it")
    commands.add_parser("ls", help="what there is")
    for verb in VERBS:
        commands.add_parser(verb).add_argument("node", metavar="HOST")
    for verb in ("exec", "ssh"):
        inside = commands.add_parser(verb)
        inside.add_argument("node", metavar="HOST")
        inside.add_argument("command", nargs=argparse.REMAINDER)
    return top


def main(argv: list[str]) -> int:
    asked = parser().parse_args(argv)
    name = asked.name or "lab"
    try:
        if asked.verb == "up":
            return _up(asked, name)
        if asked.verb == "down":
            Lab.find(name).down()
        elif asked.verb == "ls":
            _list(asked.name)
        elif asked.verb == "exec":
            argv = Lab.find(name).command(asked.node, asked.command or ["bash"])
            os.execvp(argv[0], argv)
        elif asked.verb == "ssh":
            os.execvp("ssh", ["ssh", "-F", str(Lab.find(name).ssh_config), asked.node, *asked.command])
        else:
            getattr(Lab.find(name), asked.verb)(asked.node)
    except LabTrouble as trouble:
        print(f"lab: {trouble}", file=sys.stderr)
        return 1
    return 0


def _up(asked: argparse.Namespace, name: str) -> int:
    began = time.monotonic()
    owner = None if asked.owner is None else place.owner_of(asked.owner)
    made = labs.up(LabSpec(name, asked.hosts, asked.lease, asked.ttl, asked.agents, owner))
    nodes = ", ".join(node.name for node in made.spec.nodes() if node.kind != "switch")
    print(f"lab {name}: {nodes}, in {time.monotonic() - began:.1f} s")
    print(f"ssh -F {made.ssh_config} host-a")
    return 0


def _list(name: str | None) -> None:
    top = place.labs_dir()
    for one in place.names(top) if name is None else [name]:
        found = Lab.find(one)
        owner = found.spec.owner
        whose = "" if owner is None else f", of process {owner.pid}{'' if place.is_alive(owner) else ' (dead)'}"
        print(f"{one}: leases in {found.spec.lease}, TTL {found.spec.ttl}{whose}")
        for node in found.spec.nodes():
            print(f"  {node.name:9} {node.address:12} {found.state(node.name)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
