"""Set up a session's private network: a veth pair, one /30 of the configured range, NAT to the outside.

The interface's name is made from the address of the /30, and the kernel allows
a name once: no two sessions on this machine share one, also if they belong to
different hosts (state directories).
"""

from __future__ import annotations

import errno
import ipaddress
import os
import shutil
import socket
import subprocess
from pathlib import Path

from cmdop_migrate.errors import Blocked
from cmdop_migrate.model import Link
from cmdop_migrate.session.rtnetlink import LOOPBACK, Netlink

PREFIX = "cmdop"
INSIDE = "eth0"
TABLE = "cmdop_migrate"
_BITS = 30
_LOCK_TABLE = "cmdop_migrate_lock"
# CRIU marks the packets by which it tells a socket that its peer has closed (SOCCR_MARK).
_CRIU_MARK = 0xC114
# For a network that is being restored: nothing arrives in it, from inside or outside, but what CRIU sends. Without its
# packets a connection whose peer closed before the dump would be open again, and its reader would wait forever.
LOCK = f"""
table inet {_LOCK_TABLE} {{
    chain input {{
        type filter hook input priority -300; policy drop;
        meta mark {_CRIU_MARK:#x} accept
    }}
}}
"""
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


def link_at(subnet: str, number: int) -> Link:
    """Return the link of the `number`-th /30. Pure."""
    first = int(ipaddress.IPv4Network(subnet).network_address) + 4 * number
    return Link(
        veth=f"{PREFIX}{first >> 2:x}",
        gateway=str(ipaddress.IPv4Address(first + 1)),
        address=str(ipaddress.IPv4Address(first + 2)),
        prefix=_BITS,
    )


def rules() -> str:
    """Return the nft transaction that lets sessions out under the host's address, and keeps them apart. Pure.

    The rules go by the names of the interfaces, so they are the same for all hosts (state directories) of a machine,
    with any ranges: none undoes another's, and they take one place among the kernel's hooks. (An input interface after
    routing: Linux 5.7.)
    """
    return f"""
        add table ip {TABLE}
        add chain ip {TABLE} out {{ type nat hook postrouting priority 100; }}
        flush chain ip {TABLE} out
        add rule ip {TABLE} out iifname "{PREFIX}*" oifname != "{PREFIX}*" masquerade
        add chain ip {TABLE} between {{ type filter hook forward priority 0; }}
        flush chain ip {TABLE} between
        add rule ip {TABLE} between iifname "{PREFIX}*" oifname "{PREFIX}*" drop
    """


class LinkTaken(Exception):
    """Report that another session got this /30 first."""


class ClaimedLink:
    """Hold a link whose name, and so whose /30, no other process of this machine takes until `release`.

    The claim is a socket bound to an abstract address: the kernel gives it to one process, and takes it back when that
    process ends. Without it, two restores that find a name free would both have CRIU create the interface.
    """

    def __init__(self, link: Link, claim: socket.socket) -> None:
        self.link, self._claim = link, claim

    def release(self) -> None:
        """Give up the claim."""
        self._claim.close()


def claim(link: Link) -> ClaimedLink | None:
    """Claim the link's name. Return None if an interface of that name exists, or another process is about to create
    it."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        bound.bind(f"\0cmdop-migrate/link/{link.veth}")
    except OSError as error:
        bound.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    if exists(link):  # after binding: its last claimer released the name only once the interface existed
        bound.close()
        return None
    return ClaimedLink(link, bound)


def choose(subnet: str) -> ClaimedLink:
    """Claim a /30 that is not used on this machine. Random, not ascending: a session keeps its address when it moves,
    so hosts should not all choose the same ones. Raise Blocked if none is left."""
    total = ipaddress.IPv4Network(subnet).num_addresses // 4
    for _ in range(1000):
        claimed = claim(link_at(subnet, 1 + int.from_bytes(os.urandom(8)) % (total - 1)))
        if claimed is not None:
            return claimed
    raise Blocked(f"no free /30 left in {subnet}", "Set a larger `subnet`, or end sessions you no longer need.")


def connect(pid: int, link: Link) -> None:
    """Give the network namespace of `pid` a veth pair to the outside, which vanishes with the namespace. Raise
    LinkTaken if the name, and so the /30, is no longer free, and Blocked."""
    let_out()
    try:
        _lay(pid, link)
    except FileExistsError as error:
        raise LinkTaken(link.veth) from error
    except OSError as error:
        hint = "See: cmdop-migrate doctor; or run with --net host."
        raise Blocked(f"cannot set up the session's network: {error.strerror}", hint) from error


def _lay(pid: int, link: Link) -> None:
    with Netlink() as host:
        host.add_veth(link.veth, INSIDE, pid)
        raise_outer_end(host, link)
    with Netlink(pid) as inside:
        inside.raise_link(LOOPBACK)
        inner = inside.index(INSIDE)
        inside.add_address(inner, link.address, link.prefix)
        inside.raise_link(inner)
        inside.set_default_route(link.gateway)


def exists(link: Link) -> bool:
    """Return whether the host has the interface."""
    return os.path.exists(f"/sys/class/net/{link.veth}")


def reconnect(pid: int, before: Link, now: Link) -> None:
    """Configure the veth pair that CRIU has created, whose outer end is down and has no address. If the session's old
    /30 is taken on this machine, its inside gets the new address first. Raise Blocked."""
    let_out()
    if now != before:
        with Netlink(pid) as inside:
            inner = inside.index(INSIDE)
            inside.remove_address(inner, before.address, before.prefix)
            inside.add_address(inner, now.address, now.prefix)
            inside.set_default_route(now.gateway)
    with Netlink() as host:
        raise_outer_end(host, now)


def unlock(pid: int) -> None:
    """Remove the rules of LOCK from the network namespace of `pid`. Raise Blocked."""
    command = ["nsenter", "-t", str(pid), "-n", _nft(), "delete", "table", "inet", _LOCK_TABLE]
    done = subprocess.run(command, text=True, capture_output=True, check=False, timeout=20)
    if done.returncode != 0:
        raise Blocked(f"the session's network cannot be opened: {done.stderr.strip()}", "See: cmdop-migrate doctor")


def raise_outer_end(host: Netlink, link: Link) -> None:
    """Give the host's end its address, and set it up."""
    outer = host.index(link.veth)
    host.add_address(outer, link.gateway, link.prefix)
    host.raise_link(outer)


def let_out() -> None:
    """Switch on forwarding and load the rules. Raise Blocked."""
    if _FORWARD.read_text().strip() != "1":
        try:
            _FORWARD.write_text("1")
        except OSError as error:
            hint = "Run on the host: sysctl net.ipv4.ip_forward=1; or run with --net host."
            raise Blocked(f"cannot switch on forwarding: {error.strerror}", hint) from error
    done = subprocess.run([_nft(), "-f", "-"], input=rules(), text=True, capture_output=True, check=False, timeout=20)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise Blocked(f"cannot set up NAT: {last}", "See: cmdop-migrate doctor; or run with --net host.")


def _nft() -> str:
    nft = shutil.which("nft", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if nft is None:
        raise Blocked("nft is not installed: a private network needs NAT", "Run: cmdop-migrate doctor --fix")
    return nft
