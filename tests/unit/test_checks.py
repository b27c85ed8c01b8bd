"""Check every rule of doctor as a row: one fact changed, one finding expected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cmdop_migrate.preflight.facts import machine as facts_machine
from cmdop_migrate.preflight.facts.machine import CriuFacts, Facts, Mount, Network, Space
from cmdop_migrate.preflight.rules import doctor

NETWORK = Network(loopback_up=True, veth=True, nat=True, ip_forward=False, forward_dropped_by=())
SPACE = Space("/var/lib", "ext4", True, 100 << 30)
OPTIONS = dict.fromkeys([*doctor.NEEDED_OPTIONS, *doctor.WANTED_OPTIONS], "y")
TOOLS = {name: f"/usr/bin/{name}" for name in facts_machine.TOOLS}
GOOD = Facts(
    root=True,
    release="6.12.1",
    cgroup2=Mount("/sys/fs/cgroup", "cgroup2", frozenset({"rw"})),
    overlay=True,
    userfaultfd=True,
    namespaces=frozenset({"pid", "mnt", "net", "ipc", "uts", "user"}),
    capabilities=frozenset(facts_machine.CAPABILITIES),
    tools=TOOLS,
    state=SPACE,
    network=NETWORK,
    memory_available=8 << 30,
    kernel_options=OPTIONS,
    criu=CriuFacts("4.2.1", "private", frozenset({"uffd-noncoop", "mem_dirty_track"})),
)


def without(options: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in options.items() if name not in names}


def test_doctor_finds_nothing_on_a_good_host() -> None:
    found = doctor.run(GOOD)
    assert {check.level for check in found} == {"ok"}
    assert doctor.usable(found)
    assert len({check.name for check in found}) == len(found)


ROWS = [
    ("root", replace(GOOD, root=False), "missing", True, "sudo"),
    ("criu", replace(GOOD, criu=CriuFacts(problems=("too old",))), "missing", True, "too old"),
    ("criu", replace(GOOD, criu=CriuFacts()), "missing", True, "doctor --fix"),
    ("kernel", replace(GOOD, kernel_options=without(OPTIONS, "UNIX_DIAG")), "missing", True, "CONFIG_UNIX_DIAG"),
    ("kernel", replace(GOOD, kernel_options=without(OPTIONS, "INET_DIAG_DESTROY")), "degraded", False, "resetting"),
    ("kernel", replace(GOOD, kernel_options={}), "ok", False, "does not publish"),
    ("namespaces", replace(GOOD, namespaces=GOOD.namespaces - {"net"}), "missing", True, "net"),
    ("capabilities", replace(GOOD, capabilities=GOOD.capabilities - {"CAP_SYS_ADMIN"}), "missing", True, "SYS_ADMIN"),
    ("capabilities", replace(GOOD, capabilities=GOOD.capabilities - {"CAP_SYS_RESOURCE"}), "degraded", False, "--user"),
    ("cgroup2", replace(GOOD, cgroup2=None), "missing", True, "mount -t cgroup2"),
    ("cgroup2", replace(GOOD, cgroup2=Mount("/c", "cgroup2", frozenset({"ro"}))), "missing", True, "remount,rw /c"),
    ("overlay", replace(GOOD, overlay=False), "missing", True, "CONFIG_OVERLAY_FS"),
    ("state_dir", replace(GOOD, state=replace(SPACE, kind="overlay")), "missing", True, "overlay"),
    ("state_dir", replace(GOOD, state=replace(SPACE, kind="fuse.sshfs")), "missing", True, "state_dir"),
    ("state_dir", replace(GOOD, state=replace(SPACE, kind="tmpfs")), "degraded", False, "reboot"),
    ("state_dir", replace(GOOD, state=replace(SPACE, writable=False)), "missing", True, "cannot be written"),
    ("tini-static", replace(GOOD, tools={**TOOLS, "tini-static": None}), "missing", True, "package tini"),
    ("tar", replace(GOOD, tools={**TOOLS, "tar": None}), "missing", True, "tmpfs"),
    ("loopback", replace(GOOD, network=replace(NETWORK, loopback_up=False)), "missing", True, "ip link set lo up"),
    ("veth", replace(GOOD, network=replace(NETWORK, veth=False)), "missing", False, "--net host"),
    ("veth", replace(GOOD, network=replace(NETWORK, veth=None)), "degraded", False, "root"),
    ("veth", replace(GOOD, tools={**TOOLS, "ip": None}), "missing", True, "iproute2"),
    ("nat", replace(GOOD, tools={**TOOLS, "nft": None}), "missing", False, "nftables"),
    ("nat", replace(GOOD, network=replace(NETWORK, nat=False)), "missing", False, "NFT_MASQ"),
    ("nat", replace(GOOD, network=replace(NETWORK, forward_dropped_by=("ip f FORWARD",))), "degraded", False, "subnet"),
    ("userfaultfd", replace(GOOD, userfaultfd=False), "degraded", False, "CONFIG_USERFAULTFD"),
    ("userfaultfd", replace(GOOD, criu=replace(GOOD.criu, features=frozenset())), "degraded", False, "waits"),
    ("dirty_tracking", replace(GOOD, criu=replace(GOOD.criu, features=frozenset())), "degraded", False, "SOFT_DIRTY"),
    ("disk", replace(GOOD, state=replace(SPACE, free=1 << 30)), "degraded", False, "1.0 GiB"),
    ("disk", replace(GOOD, state=replace(SPACE, free=1 << 20)), "missing", True, "Free at least"),
    ("memory", replace(GOOD, memory_available=128 << 20), "degraded", False, "128.0 MiB"),
    ("memory", replace(GOOD, memory_available=1 << 20), "missing", True, "memory"),
]


@pytest.mark.parametrize(("name", "machine", "level", "fatal", "says"), ROWS)
def test_each_missing_feature_is_one_finding(name: str, machine: Facts, level: str, fatal: bool, says: str) -> None:
    found = doctor.run(machine)
    check = next(check for check in found if check.name == name)
    assert (check.level, check.fatal) == (level, fatal)
    assert says in check.message + " " + check.fix
    assert check.fix or level == "ok"
    assert doctor.usable(found) is not fatal


def test_mount_of_a_path_is_the_longest_and_last_above_it() -> None:
    text = (
        "20 1 8:1 / / rw,relatime - ext4 /dev/a rw\n"
        "21 20 8:2 / /var rw - xfs /dev/b rw\n"
        "22 20 0:9 / /var\\040two ro,noexec shared:1 - tmpfs none rw\n"
        "23 21 0:10 / /var rw - overlay none rw\n"
        "broken line\n"
    )
    mounts = facts_machine.parse_mountinfo(text)
    assert len(mounts) == 4
    kinds = {
        path: getattr(facts_machine.mount_of(path, mounts), "kind", None)
        for path in ("/var/lib", "/var two/x", "/variety")
    }
    assert kinds == {"/var/lib": "overlay", "/var two/x": "tmpfs", "/variety": "ext4"}


def test_capabilities_are_parsed_by_bit() -> None:
    assert facts_machine.parse_capabilities("CapEff:\t000001ffffffffff\n") == frozenset(facts_machine.CAPABILITIES)
    assert facts_machine.parse_capabilities("CapEff:\t000001fffeffffff\n") == frozenset(facts_machine.CAPABILITIES) - {
        "CAP_SYS_RESOURCE"
    }
    assert facts_machine.parse_capabilities("") == frozenset()


def test_kernel_options_that_are_off_are_absent() -> None:
    assert facts_machine.parse_kernel_options("CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=m\n") == {"A": "y", "C": "m"}


def test_forward_drops_are_those_of_ipv4_by_policy() -> None:
    listing = (
        '{"nftables": [{"metainfo": {}},'
        '{"chain": {"family": "ip", "table": "filter", "name": "FORWARD", "hook": "forward", "policy": "drop"}},'
        '{"chain": {"family": "ip6", "table": "filter", "name": "FORWARD", "hook": "forward", "policy": "drop"}},'
        '{"chain": {"family": "inet", "table": "t", "name": "in", "hook": "input", "policy": "drop"}}]}'
    )
    assert facts_machine.parse_forward_drops(listing) == ("ip filter FORWARD",)
