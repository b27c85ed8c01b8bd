"""Check every rule of a plan: each finds its problem, at every level it may return, and nothing in a good move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cmdop_migrate.preflight import plan
from cmdop_migrate.preflight.facts.cpu import Cpu
from cmdop_migrate.preflight.facts.host import HostProblem, LeaseFacts, Port, Service
from cmdop_migrate.preflight.facts.processes import Process
from cmdop_migrate.preflight.facts.session import Move, PastCheckpoint, estimate
from cmdop_migrate.preflight.findings import Hit, Rule, several
from cmdop_migrate.preflight.rules.obstacles import CHECKS, KINDS, Obstacle
from tests.unit.plan_facts import DATA, HELD, LIBC, MIB, WEB, a_move

Change = Callable[[Move], Move]


def session(**changes: Any) -> Change:
    return lambda move: replace(move, session=replace(move.session, **changes))


def source(**changes: Any) -> Change:
    return lambda move: replace(move, source=replace(move.source, **changes))


def target(**changes: Any) -> Change:
    return lambda move: replace(move, target=replace(move.target, **changes))


def process(**changes: Any) -> Change:
    def change(move: Move) -> Move:
        odd = replace(Process(11, "odd", 0), **changes)
        tree = replace(move.session.tree, processes=(*move.session.tree.processes, odd))
        return replace(move, session=replace(move.session, tree=tree))

    return change


def cpu(**changes: Any) -> Change:
    return lambda move: replace(move, target=replace(move.target, cpu=replace(move.target.cpu, **changes)))


def both(*changes: Change) -> Change:
    def change(move: Move) -> Move:
        for one in changes:
            move = one(move)
        return move

    return change


def no_limits(move: Move) -> Move:
    return replace(move, session=replace(move.session, tree=replace(move.session.tree, reads_limits=False)))


def stays(move: Move) -> Move:
    return replace(move, target=replace(move.source, key=None, keys=frozenset()))


def there(other: str) -> Service:
    return Service("s3://bucket/other", id=other)


# (check, level, what a message must name, the one change that brings it about)
PLANTED: list[tuple[str, str, str, Change]] = [
    ("other_users", "block", "odd", both(no_limits, process(uid=1000))),
    ("pid_namespace", "block", "odd (pid 11)", process(inner_namespace=True)),
    ("io_uring", "block", "odd (pid 11)", process(io_uring=True)),
    ("traced", "block", "pid 99", process(tracer=99)),
    ("devices", "block", "/dev/fuse", process(devices=("/dev/fuse",))),
    ("sockets", "block", "AF_VSOCK", process(sockets=("AF_VSOCK",))),
    ("deleted_files", "block", "/tmp/x", process(deleted=(("/tmp/x", 257 * MIB),))),
    ("semaphores", "warn", "odd (pid 11)", process(semaphore=True)),
    ("version", "block", "protocol 2", target(protocol=2)),
    ("state", "block", "frozen", session(state="frozen")),
    ("lease", "block", "no route", source(lease=Service("s3://bucket/l", "no route"), standing=None)),
    ("lease", "block", "has no record", source(standing=None)),
    ("lease", "block", "host-c", source(standing=replace(HELD, host="host-c", instance="c-1", token=8))),
    ("lease_there", "block", "no route", target(lease=Service("s3://bucket/l", "no route"))),
    ("lease_there", "block", "another lease store", target(lease=there("m"))),
    ("store", "block", "no route", source(store=Service("s3://bucket/p", "no route"))),
    ("store_there", "block", "no route", target(store=Service("s3://bucket/p", "no route"))),
    ("store_there", "block", "s3://bucket/other", target(store=there("t"))),
    ("store_there", "block", "the same address", target(store=Service("s3://bucket/p", id="t"))),
    ("key", "block", "key k1", target(keys=frozenset(("k2",)))),
    ("key", "block", "no key yet", source(key=None, keys=frozenset())),
    ("relay", "warn", "no relay", source(relay=Service("wss://r"))),
    ("relay", "warn", "refused", both(source(relay=Service("wss://r")), target(relay=Service("wss://r", "refused")))),
    ("relay", "warn", "wss://q", both(source(relay=Service("wss://r")), target(relay=Service("wss://q")))),
    ("host_ready", "block", "tini", target(needs=(HostProblem("tini-static", "no tini", "Install it.", True),))),
    ("host_ready", "block", "no veth", target(needs=(HostProblem("veth", "no veth", "Boot one.", False),))),
    ("host_ready", "warn", "no nat", target(needs=(HostProblem("nat", "no nat", "Install it.", False),))),
    (
        "limits_there",
        "warn",
        "CAP_SYS_RESOURCE",
        both(
            process(uid=1000),
            source(users={0: "root", 1000: "amy"}),
            target(
                users={0: "root", 1000: "amy"},
                needs=(HostProblem("capabilities", "lacks CAP_SYS_RESOURCE", "Give it.", False),),
            ),
        ),
    ),
    ("machine", "block", "aarch64", cpu(machine="aarch64")),
    ("machine", "block", "65536", cpu(page_size=65536)),
    ("cpu", "block", "avx2", cpu(flags=frozenset(("sse2", "avx")))),
    ("xsave", "block", "0xe0", cpu(xfeatures=0x07)),
    ("xsave", "block", "1776", cpu(frame=1776)),
    ("xsave", "warn", "11952", cpu(frame=11952)),
    ("xsave", "info", "not compared", cpu(frame=None)),
    ("kernel", "block", "6.1.0-31-amd64", target(kernel="6.1.0-31-amd64")),
    ("criu", "warn", "4.1.1", target(criu="4.1.1")),
    ("criu", "warn", "userfaultfd", target(criu_features=frozenset())),
    ("criu", "block", "no CRIU", source(criu=None)),
    ("memory", "block", "host-b", target(memory_available=150 * MIB)),
    ("memory", "warn", "host-b", target(memory_available=190 * MIB)),
    ("disk", "block", "host-b", target(disk_free=80 * MIB)),
    ("disk", "warn", "host-b", target(disk_free=120 * MIB)),
    ("disk", "block", "host-a", source(disk_free=120 * MIB)),
    ("files", "warn", "libc.so.6 (different)", target(wanting={LIBC.path: "different"})),
    ("files", "block", "data.csv (missing)", target(wanting={DATA.path: "missing"})),
    (
        "files",
        "block",
        "libc.so.6 (different)",
        both(target(wanting={LIBC.path: "different"}), lambda move: replace(move, carry="none")),
    ),
    (
        "files",
        "warn",
        "data.csv (missing)",
        both(target(wanting={DATA.path: "missing"}), lambda move: replace(move, carry="opened")),
    ),
    ("connections", "warn", "ssh to 10.1.1.1:22", session(outside=("ssh to 10.1.1.1:22",))),
    ("ports", "block", "tcp port 8080", both(session(ports=(WEB,)), target(listening=(WEB,)))),
    ("addresses", "block", "10.0.0.9", session(ports=(replace(WEB, address="10.0.0.9"),))),
    (
        "uids",
        "block",
        "amy here and bob",
        both(process(uid=1000), source(users={0: "root", 1000: "amy"}), target(users={0: "root", 1000: "bob"})),
    ),
    ("uids", "block", "unused here and bob", both(process(uid=1000), target(users={0: "root", 1000: "bob"}))),
    ("uids", "warn", "1000 (amy)", both(process(uid=1000), source(users={0: "root", 1000: "amy"}))),
    ("directories", "block", "shared directory /data", target(directories=frozenset(("/", "/home")))),
    ("directories", "warn", "/home", target(directories=frozenset(("/", "/data")))),
    ("hooks", "warn", "/etc/flush", session(hooks=("/etc/flush",))),
    ("name", "block", "'work'", target(name_taken=True)),
    ("watches", "block", "tail (pid 3)", session(unseen=("tail (pid 3) watches a file that has been deleted",))),
    ("device_nodes", "block", "/root/sda", session(nodes=("/root/sda",))),
    ("device_nodes", "warn", "--allow-devices", both(session(nodes=("/root/sda",)), stays)),
    ("databases", "warn", "/root/books.db", session(databases=("/root/books.db",))),
    ("expected", "info", "not measured yet", lambda move: move),
    *(
        (kind.check, "block" if kind.blocks else "warn", "odd (pid 11) in session", process(obstacles=((name, "x"),)))
        for name, kind in KINDS.items()
    ),
]


def test_good_move_has_no_findings() -> None:
    assert [one.check for one in plan.find(a_move())] == ["expected"]


@pytest.mark.parametrize(("check", "level", "names", "change"), PLANTED, ids=[f"{one[0]}-{one[2]}" for one in PLANTED])
def test_planted_problem_is_the_only_finding(check: str, level: str, names: str, change: Change) -> None:
    found = plan.find(change(a_move()))
    others = [one for one in found if one.check not in (check, "expected")]
    assert others == []
    said = [one for one in found if one.check == check]
    assert [one.level for one in said] == [level]
    assert names in said[0].message and said[0].fix


def test_every_check_is_tested_at_every_level() -> None:
    stated = {(one.name, level) for one in plan.checks() for level in one.levels}
    assert {(check, level) for check, level, _, _ in PLANTED} == stated
    assert len({one.name for one in plan.checks()}) == len(plan.checks())


def test_obstacle_without_a_process_names_the_session() -> None:
    tree = replace(a_move().session.tree, obstacles=(Obstacle("mount", "ramfs at /mnt"),))
    (found,) = [one for one in plan.find(session(tree=tree)(a_move())) if one.level == "block"]
    assert found.message == "session 'work' has a file system mounted that CRIU cannot restore: ramfs at /mnt"
    assert {kind.check for kind in KINDS.values()} == {name for name, _, _ in CHECKS}


def test_findings_are_sorted_worst_first() -> None:
    move = both(process(io_uring=True, semaphore=True), target(kernel="5.10"))(a_move())
    assert [one.level for one in plan.find(move)] == ["block", "block", "warn", "info"]


def test_session_restored_on_its_own_host_does_not_block_itself() -> None:
    """Check a move to the same host: its ports are its own, and its memory is freed before it is needed again."""
    move = session(ports=(WEB,), private_net=False)(a_move())
    move = replace(
        move, source=replace(move.source, listening=(WEB,), memory_available=MIB, key=None, keys=frozenset())
    )
    assert [one.check for one in plan.find(replace(move, target=move.source))] == ["expected"]


@pytest.mark.parametrize(
    ("here", "there", "clash"),
    [
        (Port("tcp", "0.0.0.0", 80), Port("tcp", "127.0.0.1", 80), True),
        (Port("tcp", "127.0.0.1", 80), Port("tcp", "[::]", 80), True),
        (Port("tcp", "127.0.0.1", 80), Port("tcp", "10.0.0.1", 80), False),
        (Port("tcp", "0.0.0.0", 80), Port("udp", "0.0.0.0", 80), False),
        (Port("tcp", "0.0.0.0", 80), Port("tcp", "0.0.0.0", 81), False),
    ],
)
def test_ports_clash_as_in_the_kernel(here: Port, there: Port, clash: bool) -> None:
    move = both(session(ports=(here,)), target(listening=(there,)))(a_move())
    assert ("ports" in [one.check for one in plan.find(move)]) is clash


def test_newer_host_with_more_features_has_no_findings() -> None:
    flags = frozenset(("sse2", "avx", "avx2", "smep", "avx512f"))
    richer = both(cpu(flags=flags, xfeatures=0x2E7), target(kernel="7.0", criu="5.0"))(a_move())
    assert [one.check for one in plan.find(richer)] == ["expected"]
    poorer = cpu(flags=frozenset(("sse2", "avx", "avx2")))(a_move())  # smep is the kernel's own business
    assert [one.check for one in plan.find(poorer)] == ["expected"]


def test_every_cpu_flag_counts_on_arm() -> None:
    arm = Cpu("aarch64", 4096, frozenset(("fp", "sve")))
    move = both(source(cpu=arm), target(cpu=replace(arm, flags=frozenset(("fp",)))))(a_move())
    assert "sve" in next(one.message for one in plan.find(move) if one.check == "cpu")


def test_lease_of_an_earlier_boot_is_not_held() -> None:
    move = source(standing=LeaseFacts("held", "host-a", "a-0", 7))(a_move())
    assert [one.check for one in plan.find(move)] == ["lease", "expected"]


def test_checkpoint_cost_is_estimated_from_earlier_ones() -> None:
    small, large = (
        PastCheckpoint("x", 10 * MIB, 0, MIB, 0.2, 0.1),
        PastCheckpoint("y", 1000 * MIB, 0, 300 * MIB, 1.0, 4.0),
    )
    assert estimate(900 * MIB, 0, (), "s") is None
    nearest = estimate(2000 * MIB, 0, (small, large), "s")
    assert nearest is not None and (nearest.frozen_s, nearest.new, nearest.own) == (2.0, 600 * MIB, False)
    fixed = estimate(MIB, 0, (small, large), "s")  # a part of the time is there however small it is
    assert fixed is not None and fixed.frozen_s == 0.2
    own = estimate(10 * MIB, 0, (small, large), "y")
    assert own is not None and (own.frozen_s, own.own) == (1.0, True)
    assert estimate(0, 0, (PastCheckpoint("z", 0, 0, 0, 0.1, 0.0),), "z") is not None
    move = session(measured=(large,))(a_move())
    assert "frozen about 1.00 s" in plan.find(move)[-1].message


def test_rule_may_return_documented_levels_only() -> None:
    rule: Rule[int] = Rule("odd", ("warn",), "…", "…", lambda _: [Hit("block", "no")])
    with pytest.raises(AssertionError, match="odd"):
        list(rule.run(1))


def test_long_lists_are_shortened() -> None:
    assert several(["a", "b", "a"]) == "a, b"
    assert several(str(one) for one in range(8)) == "0, 1, 2, 3, 4 and 3 more"
