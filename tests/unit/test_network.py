"""Addresses and rules of private networks, and the sockets read from /proc."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.errors import Blocked
from cmdop_migrate.session import network
from cmdop_migrate.session.inspect import socket_table


@given(st.integers(8, 24), st.integers(0, 1 << 22))
def test_links_never_collide(prefix: int, number: int) -> None:
    subnet = str(ipaddress.IPv4Network((0x64400000 >> (32 - prefix) << (32 - prefix), prefix)))
    number %= 1 << (30 - prefix)
    link = network.link_at(subnet, number)
    block = ipaddress.IPv4Interface(f"{link.address}/{link.prefix}").network
    assert ipaddress.IPv4Address(link.gateway) in block and block.subnet_of(ipaddress.IPv4Network(subnet))
    assert len(link.veth) <= 15
    # The same block has the same name, regardless of the subnet it was counted from.
    other = network.link_at(str(block.supernet(new_prefix=24)), (int(block.network_address) & 0xFF) >> 2)
    assert other == link


def test_names_differ_between_subnets() -> None:
    assert network.link_at("100.64.0.0/24", 1).veth != network.link_at("100.65.0.0/24", 1).veth


def test_rules_are_the_same_for_all_hosts_of_a_machine() -> None:
    """The kernel has 1,024 places for hooks: a host may not take one of its own, nor undo what another relies on."""
    text = network.rules()
    assert text.count("hook") == 2 and "delete" not in text
    assert 'iifname "cmdop*" oifname != "cmdop*" masquerade' in text
    assert 'iifname "cmdop*" oifname "cmdop*" drop' in text


def test_choose_fails_when_all_links_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "exists", lambda _: True)
    with pytest.raises(Blocked):
        network.choose("10.0.0.0/24")


def test_two_simultaneous_restores_never_choose_the_same_link() -> None:
    """In CI two migrations of ten chose one of 63 names, and CRIU failed to create the second interface."""
    claimed = [network.choose("10.0.0.0/28") for _ in range(3)]
    assert len({one.link.veth for one in claimed}) == 3
    with pytest.raises(Blocked):
        network.choose("10.0.0.0/28")
    assert network.claim(claimed[1].link) is None
    claimed[1].release()
    again = network.claim(claimed[1].link)
    assert again is not None
    for one in (claimed[0], again, claimed[2]):
        one.release()


def test_socket_table() -> None:
    rest = "00000000:00000000 00:00000000 00000000     0        0"
    files = {
        "tcp": [f"0: 0100007F:1F90 00000000:0000 0A {rest} 11 1 0", f"1: 0100007F:1F90 0200000A:01BB 01 {rest} 12 1"],
        "tcp6": [f"0: 00000000000000000000000001000000:0050 {'0' * 32}:0000 0A {rest} 13 1"],
        "udp": [f"0: 00000000:0035 00000000:0000 07 {rest} 14 2"],
        "unix": ["ffff: 00000002 00000000 00010000 0001 01 15 /run/a b", "ffff: 00000003 00000000 00000000 0001 03 16"],
    }
    found = socket_table(lambda name: files.get(name, []))
    assert {inode: (one.kind, one.local, one.remote, one.state) for inode, one in found.items()} == {
        11: ("tcp", "127.0.0.1:8080", "", "LISTEN"),
        12: ("tcp", "127.0.0.1:8080", "10.0.0.2:443", "ESTABLISHED"),
        13: ("tcp", "[::1]:80", "", "LISTEN"),
        14: ("udp", "0.0.0.0:53", "", ""),
        15: ("unix", "/run/a b", "", "LISTEN"),
        16: ("unix", "", "", ""),
    }
