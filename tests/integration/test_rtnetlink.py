"""Check our netlink requests with pyroute2, which reads back their effect."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Iterator

import pytest
from pyroute2 import NetNS

from cmdop_migrate.session import rtnetlink
from cmdop_migrate.session.rtnetlink import LOOPBACK, Netlink
from tests.support.host import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")


@pytest.fixture
def pids() -> Iterator[list[int]]:
    """Yield two processes, each in its own network namespace."""
    ours = os.readlink("/proc/self/ns/net")
    held = [subprocess.Popen(["unshare", "--net", "sleep", "60"]) for _ in range(2)]
    try:
        until(lambda: all(os.readlink(f"/proc/{one.pid}/ns/net") != ours for one in held), 10, "their own namespaces")
        yield [one.pid for one in held]
    finally:
        for one in held:
            one.kill()
            one.wait()


def named(pid: int, name: str) -> dict[str, object]:
    with NetNS(f"/proc/{pid}/ns/net") as space:
        (link,) = [one for one in space.get_links() if one.get("ifname") == name]
        routes = [(one.get("gateway"), one.get("oif")) for one in space.get_default_routes()]
        return {
            "kind": link.get(("linkinfo", "kind")),
            "up": bool(link["flags"] & 1),
            "addresses": [
                (one.get("local"), one["prefixlen"])
                for one in space.get_addr(index=link["index"], family=socket.AF_INET)
            ],
            "routes": [gateway for gateway, out in routes if out == link["index"]],
        }


def test_veth_pair_between_two_namespaces(pids: list[int]) -> None:
    first, second = pids
    with Netlink(first) as here, Netlink(second) as there:
        here.add_veth("cable", "eth0", second)
        for space, name, address in ((here, "cable", "10.9.8.1"), (there, "eth0", "10.9.8.2")):
            index = space.index(name)
            space.add_address(index, address, 30)
            space.add_address(index, address, 30)  # also when it is there
            space.raise_link(index)
            space.raise_link(LOOPBACK)
        there.set_default_route("10.9.8.1")
        there.set_default_route("10.9.8.1")
    assert named(first, "cable") == {"kind": "veth", "up": True, "addresses": [("10.9.8.1", 30)], "routes": []}
    assert named(second, "eth0") == {
        "kind": "veth",
        "up": True,
        "addresses": [("10.9.8.2", 30)],
        "routes": ["10.9.8.1"],
    }
    ping = [
        "nsenter",
        "-t",
        str(second),
        "-n",
        "python3",
        "-c",
        "import socket; socket.create_server(('127.0.0.1', 0))",
    ]
    assert subprocess.run(ping, timeout=20, check=False).returncode == 0, "lo is up there"
    with Netlink(second) as there:
        index = there.index("eth0")
        there.remove_address(index, "10.9.8.2", 30)
        there.add_address(index, "10.9.8.6", 30)
        there.set_default_route("10.9.8.5")
    assert named(second, "eth0")["addresses"] == [("10.9.8.6", 30)]
    assert named(second, "eth0")["routes"] == ["10.9.8.5"]


def test_own_namespace_is_unchanged(pids: list[int]) -> None:
    before = os.readlink("/proc/thread-self/ns/net"), os.listdir("/sys/class/net")
    with Netlink(pids[0]) as here:
        here.add_veth("cable", "eth0", pids[1])
    assert (os.readlink("/proc/thread-self/ns/net"), os.listdir("/sys/class/net")) == before


def test_errors_have_the_kernels_reason(pids: list[int]) -> None:
    first, second = pids
    with Netlink(first) as here:
        here.add_veth("cable", "eth0", second)
        with pytest.raises(FileExistsError):
            here.add_veth("cable", "eth1", second)
        with pytest.raises(FileNotFoundError, match="no interface nowhere"):
            here.index("nowhere")
        with pytest.raises(ProcessLookupError):
            here.add_veth("other", "eth1", 2**22 + 1)
        with pytest.raises(OSError) as caught:
            here.remove_address(here.index("cable"), "10.1.1.1", 30)
        assert caught.value.errno == errno.EADDRNOTAVAIL
        with pytest.raises(OSError) as caught:
            here.set_default_route("10.77.0.1")  # no interface leads there
        assert caught.value.errno == errno.ENETUNREACH
        with pytest.raises(OSError):
            here.add_veth("n" * 16, "eth1", second)  # one more than a name may have
        assert here.index("lo") == LOOPBACK  # the socket is usable after every refusal
    with pytest.raises(FileNotFoundError):
        Netlink(2**22 + 1)


def test_netlink_attributes_are_padded() -> None:
    for length in range(9):
        made = rtnetlink.attribute(3, b"x" * length)
        assert len(made) % 4 == 0 and int.from_bytes(made[:2], "little") == 4 + length
