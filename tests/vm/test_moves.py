"""Sessions between two kernels, two distributions and two processors: what crosses, and what the plan refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.host import until
from tests.vm.machines import Machines, VmHost

pytestmark = pytest.mark.timeout(1500)
# A listener, a client of it on loopback, and a database; each number goes through all three. The database is opened anew for
# each: SQLite does not write to one whose inode number has changed under an open connection (docs/reference/limits.md).
WORKSHOP = """
import itertools, socket, sqlite3, threading, time
server = socket.create_server(("127.0.0.1", 7007))
ours = socket.create_connection(("127.0.0.1", 7007))
theirs = server.accept()[0]
sqlite3.connect("/var/tmp/numbers.db").execute("create table numbers (n integer primary key)").connection.close()
def echo():
    while word := theirs.recv(8):
        theirs.sendall(word)
threading.Thread(target=echo, daemon=True).start()
held = bytes(range(256)) * 65536
for n in itertools.count(1):
    ours.sendall(b"%08d" % n)
    assert int(ours.recv(8)) == n
    base = sqlite3.connect("/var/tmp/numbers.db", isolation_level=None)
    base.execute("insert into numbers values (?)", (n,))
    count, = base.execute("select count(*) from numbers").fetchone()
    base.close()
    assert count == n and held[n % 1000] == n % 1000 % 256
    print("n", n, flush=True)
    time.sleep(0.2)
"""


def plan(host: VmHost, session: str, to: str, *options: str) -> dict[str, dict[str, Any]]:
    """What blocks, by the check's name."""
    done = host.cm("--json", "plan", session, "--to", to, *options)
    assert done.returncode in (0, 4), done.stderr.decode()
    import json

    found = json.loads(done.stdout)
    assert found["ok"] == (done.returncode == 0)
    blocks = {one["check"]: one for one in found["findings"] if one["level"] == "block"}
    assert bool(blocks) == (done.returncode == 4)
    return blocks


def test_shell_python_sqlite_listener_and_loopback_client(vms: Machines) -> None:
    """A person's shell with a variable and a background job: one program that listens, is its own client, and has a database."""
    a, b = vms.hosts
    session = a.start("bash", "--norc", "--noprofile", name="shop")["session"]
    a.write("/tmp/workshop.py", WORKSHOP)
    a.ok("send", "shop", "PS1='$ '; kept=41; cd /var/tmp; python3 /tmp/workshop.py &", "--enter")
    a.wait_for(session, "n 5")
    facts = a.cm_json("migrate", "shop", "--to", "host-b", timeout=400)
    assert (facts["from"], facts["to"], facts["token"]) == ("host-a", "host-b", 2)
    print(f"\n  frozen {facts['frozen_s']:.2f} s, downtime {facts['downtime_s']:.2f} s, {facts['phases']}")
    b.counts_on(session)
    b.ok("send", "shop", "echo is $((kept + 1)) in $PWD, $(jobs -r | wc -l 2> /dev/null || jobs -r)", "--enter")
    b.wait_for(session, "is 42 in /var/tmp")
    listening = b.cm_json("show", session)
    assert "7007" in str(listening), listening
    assert not a.session_pids(session)


def test_to_the_newer_kernel_and_back(vms: Machines) -> None:
    """6.1 to 6.12 as it is; back only on the word of who asks, for programs may have asked the newer one what it can do."""
    a, b = vms.hosts
    session = a.counter("pendulum")
    assert plan(a, session, "host-b") == {}
    a.ok("migrate", "pendulum", "--to", "host-b", timeout=400)
    there = b.counts_on(session)
    blocks = plan(b, session, "host-a")
    assert set(blocks) == {"kernel"}, blocks
    assert re.search(r"older kernel, 6\.1\.", blocks["kernel"]["message"]) and "6.12." in blocks["kernel"]["message"]
    b.fails("migrate", session, "--to", "host-a", status=4, code="blocked", timeout=400)
    assert b.counts_on(session) > there
    facts = b.cm_json("migrate", session, "--to", "host-a", "--accept", "kernel", timeout=400)
    assert facts["token"] == 3
    a.counts_on(session)
    assert not b.session_pids(session)


def test_plan_refuses_libraries_of_another_version_without_carry(vms: Machines) -> None:
    """bookworm's libc is not trixie's. Carried along it is no obstacle."""
    a, _ = vms.hosts
    session = a.counter("libs")
    blocks = plan(a, session, "host-b", "--carry", "none")
    assert "files" in blocks and "libc.so.6" in str(blocks["files"]), blocks
    assert plan(a, session, "host-b") == {}


def test_plan_refuses_too_little_memory(vms: Machines) -> None:
    a, b = vms.hosts
    session = a.start(
        "python3", "-c", "x = bytearray(b'x' * (160 << 20)); print('held', flush=True); input()", name="big"
    )["session"]
    a.wait_for(session, "held")
    assert plan(a, session, "host-b") == {}
    free = int(b.shell("awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo"))
    b.shell(f"mount -t tmpfs -o size=100% none /mnt && head -c {free - 90}M /dev/zero > /mnt/full")
    try:
        blocks = plan(a, session, "host-b")
    finally:
        b.shell("umount /mnt")
    assert "memory" in blocks, blocks
    assert plan(a, session, "host-b") == {}


def test_plan_refuses_a_processor_without_what_programs_have_seen(vms: Machines) -> None:
    """host-b boots once more, without AVX2 and what builds on it: libc on host-a has chosen its functions by it."""
    a, b = vms.hosts
    session = a.counter("simd")
    assert "avx2" in a.shell("grep -m1 flags /proc/cpuinfo")
    with vms.other_processor(b, "-avx2"):
        assert "avx2" not in b.shell("grep -m1 flags /proc/cpuinfo")
        blocks = plan(a, session, "host-b")
        assert "cpu" in blocks and "avx2" in blocks["cpu"]["message"], blocks
        a.fails("migrate", session, "--to", "host-b", status=4, code="blocked", timeout=400)
        a.counts_on(session)
    until(lambda: plan(a, session, "host-b") == {}, 120, "host-b has it again")
