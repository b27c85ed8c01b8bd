"""Provide the facts of a move without problems; each test changes one fact."""

from __future__ import annotations

from cmdop_migrate.preflight.facts.cpu import Cpu
from cmdop_migrate.preflight.facts.host import HostFacts, LeaseFacts, Port, Service
from cmdop_migrate.preflight.facts.processes import Process, Tree
from cmdop_migrate.preflight.facts.session import HeldFile, Move, SessionFacts

MIB = 1 << 20
LIBC = HeldFile("/lib/libc.so.6", 2 * MIB, 1, "ab", "cd", mapped=True)
DATA = HeldFile("/srv/data.csv", 5 * MIB, 1, None, "ef", mapped=False)
WEB = Port("tcp", "0.0.0.0", 8080)
HELD = LeaseFacts("held", "host-a", "a-1", 7)


def a_host(name: str) -> HostFacts:
    return HostFacts(
        host=f"host-{name}",
        instance=f"{name}-1",
        version="1",
        protocol=1,
        cpu=Cpu("x86_64", 4096, frozenset(("sse2", "avx", "avx2", "smep")), 0xE7, 3632),
        kernel="6.18.44-cloud",
        criu="4.2.1",
        criu_features=frozenset(("uffd-noncoop",)),
        memory_available=4096 * MIB,
        state_dir="/var/lib/cmdop-migrate",
        disk_free=4096 * MIB,
        store=Service("s3://bucket/p", id="s"),
        lease=Service("s3://bucket/l", id="l"),
        users={0: "root"},
        addresses=frozenset(("127.0.0.1", "10.0.0.1")),
        directories=frozenset(("/", "/home", "/data")),
        keys=frozenset(("k1",)),
        key="k1",
        standing=HELD,
    )


def a_session() -> SessionFacts:
    return SessionFacts(
        session="5e55",
        name="work",
        host="host-a",
        token=7,
        state="running",
        private_net=True,
        tree=Tree("work", (Process(10, "bash", 0),), reads_limits=True, deleted_limit=256 * MIB),
        memory=100 * MIB,
        files=10 * MIB,
        held=(LIBC, DATA),
        layers=("/", "/home"),
        shares=("/data",),
    )


def a_move() -> Move:
    return Move(a_session(), a_host("a"), a_host("b"))
