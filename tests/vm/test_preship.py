"""Sending ahead: what a second copy costs by deduplication, and what the kernel says has changed."""

from __future__ import annotations

import pytest

from tests.vm.machines import Machines

pytestmark = pytest.mark.timeout(1500)
MIB = 24
# Of its memory, one page in 64 changes; it says when, and waits to be told.
WORKING = f"""
import os
held = bytearray(os.urandom({MIB} << 20))
print("ready", flush=True)
while line := input():
    for page in range(0, len(held), 64 * 4096):
        held[page] ^= 1
    print("changed", line, flush=True)
"""
# Pages whose soft-dirty bit (55) is set in /proc/PID/pagemap, of those that are present (63), in private writable maps.
DIRTY = """
import struct, sys
total = dirty = 0
for pid in sys.argv[1:]:
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/pagemap", "rb", 0) as pages:
        for line in maps:
            span, mode, *_, = line.split()
            if mode[:2] != "rw" or mode[3] != "p":
                continue
            begin, end = (int(one, 16) // 4096 for one in span.split("-"))
            pages.seek(begin * 8)
            for (entry,) in struct.iter_unpack("Q", pages.read((end - begin) * 8)):
                total += entry >> 63
                dirty += entry >> 63 & entry >> 55 & 1
print(total, dirty)
"""


def test_what_changed_by_the_kernel_and_by_deduplication(vms: Machines) -> None:
    a, b = vms.hosts
    features = [one for one in a.cm_json("doctor")["checks"] if one["name"] == "dirty_tracking"]
    assert features and features[0]["level"] == "ok", features
    session = a.start("python3", "-c", WORKING, name="ahead")["session"]
    a.wait_for(session, "ready")
    first = a.cm_json("checkpoint", "ahead", "--leave-running", timeout=400)
    pids = " ".join(map(str, a.session_pids(session)))
    a.write("/tmp/dirty.py", DIRTY)
    a.shell(f"for each in {pids}; do echo 4 > /proc/$each/clear_refs; done")
    a.ok("send", "ahead", "1", "--enter")
    a.wait_for(session, "changed 1")
    total, dirty = map(int, a.shell(f"python3 /tmp/dirty.py {pids}").split())
    second = a.cm_json("checkpoint", "ahead", "--leave-running", timeout=400)
    new, memory = second["bytes"]["new"], second["bytes"]["memory"]
    print(f"\n  kernel: {dirty} of {total} pages changed, {dirty * 4 / 1024:.1f} MiB")
    print(
        f"  dedup: {new / 2**20:.1f} MiB new of {memory / 2**20:.1f} MiB (first copy {first['bytes']['new'] / 2**20:.1f} MiB)"
    )
    assert MIB * 256 // 64 <= dirty < total // 4, "the kernel tracks what changed"
    assert first["bytes"]["new"] > MIB << 20 > new, "less than all of it is sent again"
    facts = a.cm_json("migrate", "ahead", "--to", "host-b", "--pre-ship", "1", timeout=600)
    print(f"  moved: frozen {facts['frozen_s']:.2f} s, {facts['phases']}")
    b.ok("send", "ahead", "2", "--enter")
    b.wait_for(session, "changed 2")
